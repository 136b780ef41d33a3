//! Machines, shells and terminals: limits on open files, stacks and sizes of files; folders of
//! systems; variables; bytes that are no text; lines typed ahead.

use std::fs;

use super::*;

/// Copies the built-in model's tensors to a folder of `shards` shards.
#[cfg(unix)]
fn many_shards(folder: &Path, shards: usize) {
    let mut weight_map = serde_json::Map::new();
    for (name, bytes) in moeflux_tales::FILES {
        if name != "model.safetensors" {
            fs::write(folder.join(name), bytes).unwrap();
            continue;
        }
        let tensors = safetensors::SafeTensors::deserialize(bytes).unwrap();
        let mut names = tensors.names();
        names.sort_unstable();
        for (i, names) in names.chunks(names.len().div_ceil(shards)).enumerate() {
            let file = format!("model-{:05}-of-{shards:05}.safetensors", i + 1);
            let views = names.iter().map(|name| (*name, tensors.tensor(name).unwrap()));
            let shard = safetensors::serialize(views, None).unwrap();
            fs::write(folder.join(&file), shard).unwrap();
            weight_map.extend(names.iter().map(|name| ((*name).to_owned(), file.clone().into())));
        }
    }
    let index = serde_json::json!({ "weight_map": weight_map }).to_string();
    fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
}

/// Runs the program in a shell after `limit`.
#[cfg(unix)]
fn run_limited(limit: &str, args: &[&str]) -> Said {
    let program = moeflux(args);
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{limit}; exec \"$0\" \"$@\"")]).arg(program.get_program());
    shell.args(args).stdin(Stdio::null());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    said(shell.output().unwrap())
}

#[cfg(unix)]
#[test]
fn a_model_of_many_shards_needs_one_open_file_each() {
    let folder = temp();
    many_shards(folder.path(), 100);
    let model = folder.path().to_str().unwrap();
    let args = ["run", "-n", "3", "--model", model, FOX];
    for io in ["auto", "direct"] {
        let args = [&args[..], &["--io", io]].concat();
        // The soft limit is raised. The hard one has room for one open file each.
        for limit in ["ulimit -Sn 64", "ulimit -n 190"] {
            let said = run_limited(limit, &args);
            assert_eq!((said.code, said.out.as_str()), (0, "A Crow\n"), "{limit}: {said:?}");
        }
    }
    let direct = [&args[..], &["--io", "direct"]].concat();
    let said = run_limited("ulimit -n 190", &direct);
    assert!(said.err.contains("buffered, as the limit on open files"), "{said:?}");
    let said = run_limited("ulimit -n 90", &args);
    assert_error(&said, 1, &["may have 90 open", "ulimit -n 4096", "safetensors"]);
    assert!(!said.err.contains("download"), "{said:?}");
}

#[cfg(unix)]
#[test]
fn a_small_stack_suffices() {
    let said = run_limited("ulimit -s 256", &["run", "-n", "3", FOX]);
    assert_eq!((said.code, said.out.as_str()), (0, "A Crow\n"), "{said:?}");
}

#[cfg(unix)]
#[test]
fn a_limit_on_file_sizes_is_an_error_with_advice() {
    let folder = temp();
    let session = folder.path().join("a.session");
    let args = ["run", "-n", "3", "--session", session.to_str().unwrap(), FOX];
    succeed(&["run", "-n", "3", FOX]);
    let said = run_limited("ulimit -f 8", &args);
    assert_eq!((said.code, said.out.as_str()), (1, "A Crow\n"), "{said:?}");
    assert!(said.err.contains("bytes") && said.err.contains("ulimit -f unlimited"), "{said:?}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn entries_of_the_system_do_not_fill_a_folder() {
    let folder = temp();
    let out = folder.path().join("out");
    let config = moeflux_goldens::golden("qwen3_moe").join("config.json");
    let synth = ["synth", "-q", "--config", config.to_str().unwrap(), "--out"];
    let synth = [&synth[..], &[out.to_str().unwrap()]].concat();
    fs::create_dir_all(out.join("lost+found")).unwrap();
    fs::write(out.join(".DS_Store"), "").unwrap();
    succeed(&synth);
    let packed = folder.path().join("packed");
    fs::create_dir_all(packed.join("System Volume Information")).unwrap();
    let (model, packed) = (out.to_str().unwrap(), packed.to_str().unwrap());
    succeed(&["pack", "-q", "--model", model, "--out", packed]);
    let said = run(&synth);
    assert_error(&said, 1, &["holds files"]);
}

#[test]
fn paths_start_at_home_and_empty_variables_are_none() {
    let home = temp();
    let model = home.path().join("models/tales");
    fs::create_dir_all(&model).unwrap();
    for (name, bytes) in moeflux_tales::FILES {
        fs::write(model.join(name), bytes).unwrap();
    }
    let home_variable = if cfg!(windows) { "USERPROFILE" } else { "HOME" };
    let told = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = moeflux(args);
        command.env(home_variable, home.path()).envs(variables.iter().copied());
        let said = said(command.output().unwrap());
        assert_eq!((said.code, said.out.as_str()), (0, "A Crow\n"), "{args:?}: {said:?}");
    };
    let ask = ["run", "-n", "3", FOX];
    told(&[&ask[..], &["--model=~/models/tales", "--session=~/a"]].concat(), &[]);
    assert!(home.path().join("a").is_file());
    told(&ask, &[("MOEFLUX_MODEL", "~/models/tales")]);
    let names = ["MODEL", "MEMORY", "GPU_MEMORY", "THREADS", "DEVICE"];
    let empty = names.map(|name| format!("MOEFLUX_{name}"));
    told(&ask, &empty.each_ref().map(|name| (name.as_str(), "")));
}

#[test]
fn a_byte_order_mark_is_skipped_and_other_bytes_end_one_turn() {
    let told = succeed(&["run", "-n", "8", FOX]);
    let said = with_stdin(&["run", "-n", "8"], format!("\u{feff}{FOX}\n").as_bytes());
    assert_eq!((said.code, &said.out), (0, &told), "{said:?}");
    let said = with_stdin(&["run", "-"], b"one\ntwo \xe9\n");
    assert_error(&said, 1, &["0xe9 at offset 8, in line 2", "iconv -f latin1"]);

    let talk = [format!("\u{feff}{FOX}\n").as_bytes(), b"caf\xe9\n", FOX.as_bytes()].concat();
    let said = with_stdin(&["chat", "-n", "3"], &talk);
    assert_error(&said, 1, &["the line is not UTF-8", "0xe9 at offset 3"]);
    assert_eq!(said.out.lines().count(), 2, "{said:?}");
    assert!(said.out.starts_with("A Crow\n"), "{said:?}");
}

/// Runs the program on a pseudo-terminal and returns the screen. Each step types keys when a text
/// has appeared.
#[cfg(target_os = "linux")]
fn on_a_terminal(columns: u16, args: &[&str], steps: &[(&str, &[u8])]) -> String {
    use std::io::Read;

    use rustix::{
        fs::{Mode, OFlags, open},
        pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
        termios::{Winsize, tcsetwinsize},
    };

    let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&master).unwrap();
    unlockpt(&master).unwrap();
    let size = Winsize { ws_row: 24, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&master, size).unwrap();
    let name = ptsname(&master, Vec::new()).unwrap();
    let mut master = fs::File::from(master);
    // As a controlling terminal, it would end this process when it closes.
    let slave = fs::File::from(open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap());
    let stdio = || Stdio::from(slave.try_clone().unwrap());
    let mut command = moeflux(args);
    command.env("TERM", "xterm").stdin(stdio()).stdout(stdio()).stderr(stdio());
    let mut child = command.spawn().unwrap();
    // The terminal ends when its last user closes it.
    drop((slave, command));
    let (mut screen, mut buffer, mut seen) = (Vec::new(), [0; 4096], 0);
    let mut steps = steps.iter().peekable();
    while let Ok(read @ 1..) = master.read(&mut buffer) {
        screen.extend(&buffer[..read]);
        while let Some((text, keys)) = steps.peek() {
            let found = screen[seen..].windows(text.len()).position(|at| at == text.as_bytes());
            let Some(at) = found else { break };
            seen += at + text.len();
            master.write_all(keys).unwrap();
            steps.next();
        }
    }
    let screen = String::from_utf8_lossy(&screen).into_owned();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{screen:?}");
    screen
}

/// Last words before the first prompt.
#[cfg(target_os = "linux")]
const READY: &str = "Ctrl-D leaves";

#[cfg(target_os = "linux")]
#[test]
fn answers_and_notes_are_wrapped_at_words_on_a_terminal() {
    let screen = on_a_terminal(80, &["run", "-n", "40", "--slots", "8", FOX], &[]);
    // Progress bars are erased before the text.
    let line = |line: &'_ str| line.rsplit("\x1b[2K").next().unwrap_or(line).trim().to_owned();
    let lines: Vec<String> = screen.lines().map(line).collect();
    assert!(lines.len() > 4 && lines.iter().all(|line| line.len() <= 80), "{lines:?}");
    let (whole, answer) = (lines.join(" "), succeed(&["run", "-n", "40", FOX]));
    assert!(
        whole.contains(answer.trim()) && whole.contains("but one token needs 32"),
        "{screen:?}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn lines_typed_at_once_are_answered_in_turn() {
    let keys = format!("{FOX}\r/help\r/reset\r{FOX}\r/quit\r");
    let screen = on_a_terminal(80, &["chat", "-n", "3"], &[(READY, keys.as_bytes())]);
    assert_eq!(screen.matches("A Crow").count(), 2, "{screen:?}");
    assert!(screen.contains("/stats"), "{screen:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_line_that_is_no_text_does_not_end_a_conversation_on_a_terminal() {
    let steps = [("> ", &b"caf\xe9x"[..]), ("not UTF-8 text", b"/help\r/quit\r")];
    let screen =
        on_a_terminal(80, &["chat", "-n", "3"], &[&[(READY, &b""[..])], &steps[..]].concat());
    assert!(screen.contains("/stats"), "{screen:?}");
}
