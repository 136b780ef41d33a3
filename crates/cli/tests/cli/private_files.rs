//! Files of conversations: who may read them, links at their names, a second writer, signals.

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    os::unix::fs::{PermissionsExt, symlink},
    process::Child,
};

use super::*;

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn conversations_are_their_owners_and_replaced_files_keep_their_mode() {
    let folder = temp();
    let path = |name: &str| folder.path().join(name);
    let (session, saved, cache) = (path("a.session"), path("talk.json"), path("a/cache"));
    let talk = format!("Hi\n/save {}\n", saved.display());
    let long = "Once upon a time there was a fox. ".repeat(40);
    let chat = || {
        let args = ["chat", "-n", "2", "--session", session.to_str().unwrap()];
        let said = with_stdin(&args, talk.as_bytes());
        assert_eq!(said.code, 0, "{said:?}");
        [&session, &saved].map(|path| mode(path))
    };
    assert_eq!(chat(), [0o600; 2]);
    set_mode(&session, 0o640);
    set_mode(&saved, 0o644);
    assert_eq!(chat(), [0o640, 0o644]);

    succeed(&["run", "-n", "1", "--raw", "--prefix-cache", cache.to_str().unwrap(), &long]);
    assert_eq!([&path("a"), &cache].map(|path| mode(path)), [0o700; 2]);
    let cached: Vec<_> = fs::read_dir(&cache).unwrap().map(|e| mode(&e.unwrap().path())).collect();
    assert_eq!(cached, [0o600]);
}

#[test]
fn a_session_is_written_through_the_users_link() {
    let folder = temp();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("disk")).unwrap();
    symlink("disk/real", path("link")).unwrap();
    for _ in 0..2 {
        succeed(&["run", "-n", "1", "--session", path("link").to_str().unwrap(), FOX]);
        assert!(path("link").is_symlink() && path("disk/real").is_file());
    }
    assert_eq!(fs::read_dir(path("disk")).unwrap().count(), 1);
}

#[test]
fn a_comparison_without_a_file_writes_to_a_name_that_cannot_be_guessed() {
    let (folder, scratch) = (temp(), temp());
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("tokens"), "[1, 2, 3]").unwrap();
    let args = ["logits", "--tokens", &path("tokens"), "--exact"];
    succeed(&[&args[..], &["--out", &path("out")]].concat());
    // Links where earlier versions wrote.
    let bait = path("bait");
    symlink(&bait, scratch.path().join("moeflux-logits.safetensors")).unwrap();
    let mut command = moeflux([&args[..], &["--compare", &path("out")]].concat());
    let said = said(command.env("TMPDIR", scratch.path()).output().unwrap());
    assert_eq!(said.code, 0, "{said:?}");
    assert!(!Path::new(&bait).exists());
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 1);
}

/// Slow conversation with a session file that waits for lines.
fn slow_chat(session: &Path) -> Child {
    let args = ["chat", "--device", "reference", "--ctx", "256", "-q"];
    moeflux(args.into_iter().chain(["--session", session.to_str().unwrap()]))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn kill(child: &Child, signal: &str) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
}

#[test]
fn one_process_at_a_time_has_a_session() {
    let folder = temp();
    let session = folder.path().join("a.session");
    let mut first = slow_chat(&session);
    let mut stdin = first.stdin.take().unwrap();
    stdin.write_all(b"Hi\n").unwrap();
    let mut stdout = BufReader::new(first.stdout.take().unwrap());
    stdout.read_exact(&mut [0]).unwrap();
    let file = session.to_str().unwrap();
    let second = ["run", "-n", "1", "--kv", "f32", "--session", file, FOX];
    assert_error(&run(&second), 1, &["a.session", "another run has this session open"]);
    drop(stdin);
    stdout.read_to_end(&mut Vec::new()).unwrap();
    assert_eq!(first.wait_with_output().unwrap().status.code(), Some(0));
    succeed(&second);
    // No lock is left.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn a_session_is_saved_before_sigterm_and_sighup_end_the_program() {
    for (signal, code) in [("-TERM", 143), ("-HUP", 129)] {
        let folder = temp();
        let session = folder.path().join("a.session");
        let mut child = slow_chat(&session);
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(b"Hi\n").unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        stdout.read_exact(&mut [0]).unwrap();
        // A terminal that closes may send it twice.
        kill(&child, signal);
        kill(&child, signal);
        let mut line = String::new();
        stdout.read_line(&mut line).unwrap();
        let said = said(child.wait_with_output().unwrap());
        assert_eq!((said.code, said.err.as_str()), (code, ""), "{signal}: {said:?}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "{signal}");
        let args = ["run", "--json", "--kv", "f32", "-n", "1", "--session"];
        let more = succeed(&[&args[..], &[session.to_str().unwrap(), FOX]].concat());
        assert!(json(&more)["session"]["restored_tokens"].as_u64().unwrap() > 4, "{more}");
        drop(stdin);
    }
}

#[test]
fn a_conversation_that_waits_for_a_line_ends_at_once() {
    let folder = temp();
    let session = folder.path().join("a.session");
    let mut child = slow_chat(&session);
    let stdin = child.stdin.take().unwrap();
    let lock = folder.path().join(".a.session.lock");
    while !lock.exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    kill(&child, "-TERM");
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(!lock.exists());
    drop(stdin);
}
