//! `pull`, `list`, `show`, `rm` and `--model ORG/NAME`, from a server on the loopback.

#[allow(dead_code, reason = "tests of the downloading crate use the rest")]
#[path = "../../../hub/tests/hub/fake_hub.rs"]
mod fake_hub;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use fake_hub::{COMMIT, FakeHub, Faults, tag};
use tempfile::TempDir;

use super::*;

/// A command with the server and an empty cache.
fn with_hub(args: &[&str], hub: &FakeHub, folder: &TempDir) -> Command {
    let mut command = moeflux(args);
    for variable in ["HF_TOKEN", "HF_HUB_CACHE", "HF_TOKEN_PATH"] {
        command.env_remove(variable);
    }
    for variable in ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"] {
        command.env_remove(variable);
    }
    command.env("HF_HOME", folder.path()).env("HF_ENDPOINT", format!("http://{}", hub.address));
    command
}

fn run_with(args: &[&str], hub: &FakeHub, folder: &TempDir) -> Said {
    said(with_hub(args, hub, folder).output().unwrap())
}

/// The built-in model on a server.
fn tales() -> FakeHub {
    let files = moeflux_tales::FILES.iter().map(|(name, bytes)| (*name, bytes.to_vec()));
    FakeHub::start(&files.collect::<Vec<_>>())
}

fn snapshot(folder: &TempDir) -> PathBuf {
    folder.path().join("hub/models--org--model/snapshots").join(COMMIT)
}

#[test]
fn a_model_is_run_by_its_name() {
    let (hub, folder) = (tales(), tempfile::tempdir().unwrap());
    let fable = ["run", "--model", "org/model", "--memory", "256MiB", FOX];
    // There is no terminal to ask on.
    let refused = run_with(&fable, &hub, &folder);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.err.contains("moeflux pull org/model"), "{}", refused.err);
    assert_eq!(hub.sent(), 0);
    let [first, second] = [true, false].map(|is_first| {
        let agreed = [&fable[..], &["--yes"][..is_first.into()]].concat();
        run_with(&agreed, &hub, &folder)
    });
    assert_eq!((first.code, second.code), (0, 0), "{first:?} {second:?}");
    assert_eq!(first.out, second.out);
    assert_eq!(first.out, succeed(&["run", "--memory", "256MiB", FOX]));
    assert!(first.err.contains("downloaded before the first token"), "{}", first.err);
    assert!(!second.err.contains("download"), "{}", second.err);
    // All of it is there, and nothing came twice.
    let size: usize = moeflux_tales::FILES.iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(hub.sent(), size as u64);
    let listed = run_with(&["list"], &hub, &folder);
    assert!(listed.out.contains("org/model"), "{listed:?}");
}

#[test]
fn a_model_answers_before_it_is_downloaded() {
    let (hub, folder) = (tales(), tempfile::tempdir().unwrap());
    hub.set(Faults { breaks_after: Some(1 << 20), ..Faults::default() });
    let run = ["run", "--model", "org/model", "--yes", "--json", "--memory", "256MiB", FOX];
    let said = run_with(&run, &hub, &folder);
    assert_eq!(said.code, 0, "{said:?}");
    let report: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    let count = |name: &str| report["download"][name].as_u64().unwrap();
    let size: usize = moeflux_tales::FILES.iter().map(|(_, bytes)| bytes.len()).sum();
    let before = count("bytes_before_first_token");
    assert!(before > 0 && before < size as u64, "{before} of {size}");
    assert_eq!(count("bytes"), size as u64);
    let whole: serde_json::Value =
        serde_json::from_str(&succeed(&["run", "--json", "--memory", "256MiB", FOX])).unwrap();
    assert_eq!(report["text"], whole["text"]);
}

#[test]
fn a_server_that_fails_in_the_middle_is_the_cause_of_the_error() {
    let (hub, folder) = (tales(), tempfile::tempdir().unwrap());
    let gone =
        Faults { status: Some((404, usize::MAX)), gone_after: Some(20), ..Faults::default() };
    hub.set(gone);
    let run = ["run", "--model", "org/model", "--yes", "--memory", "256MiB", FOX];
    let said = run_with(&run, &hub, &folder);
    assert_eq!(said.code, 1, "{said:?}");
    let is_cause = said.err.contains("404") && !said.err.contains("did the file change");
    assert!(is_cause, "{}", said.err);
    // Bytes that have arrived are kept.
    hub.set(Faults::default());
    let said = run_with(&run, &hub, &folder);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(said.out, succeed(&["run", "--memory", "256MiB", FOX]));
}

#[test]
fn models_are_pulled_listed_shown_and_removed() {
    let (hub, folder) = (tales(), tempfile::tempdir().unwrap());
    let empty = run_with(&["list"], &hub, &folder);
    assert!(empty.err.contains("moeflux pull"), "{empty:?}");
    let pulled = run_with(&["pull", "org/model"], &hub, &folder);
    assert_eq!(Path::new(pulled.out.trim_end()), snapshot(&folder), "{pulled:?}");
    let again = run_with(&["pull", "org/model", "--revision", COMMIT], &hub, &folder);
    assert!(again.err.contains("is in the cache"), "{again:?}");
    let list = run_with(&["list"], &hub, &folder);
    assert!(list.out.contains("org/model") && list.out.contains("main"), "{list:?}");
    tables::assert_narrow(&list.out);
    let list: serde_json::Value =
        serde_json::from_str(&run_with(&["list", "--json"], &hub, &folder).out).unwrap();
    assert_eq!(list[0]["commit"], COMMIT);
    let shown = run_with(&["show", "org/model"], &hub, &folder);
    assert!(shown.out.contains("model.safetensors") && shown.out.contains(COMMIT), "{shown:?}");
    tables::assert_narrow(&shown.out);
    let folder_line = format!("in {}", snapshot(&folder).display());
    assert_eq!(shown.out.lines().last(), Some(&*folder_line));
    let kept = run_with(&["rm", "org/model"], &hub, &folder);
    assert_eq!((kept.code, snapshot(&folder).exists()), (2, true), "{kept:?}");
    let removed = run_with(&["rm", "org/model", "--yes"], &hub, &folder);
    assert_eq!((removed.code, snapshot(&folder).exists()), (0, false), "{removed:?}");
    let gone = run_with(&["show", "org/model"], &hub, &folder);
    assert!(gone.code == 1 && gone.err.contains("moeflux list"), "{gone:?}");
}

#[test]
fn addresses_and_revisions_are_names() {
    let hub =
        FakeHub::start(&[("M-Q4_K_M.gguf", b"four".to_vec()), ("M-Q8_0.gguf", b"eight".to_vec())]);
    let folder = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| run_with(args, &hub, &folder);
    let page = format!("http://{}/org/model/tree/v1", hub.address);
    let pulled = run(&["pull", &page]);
    let path = |name: &str| format!("{}\n", snapshot(&folder).join(name).display());
    assert_eq!(pulled.out, path("M-Q4_K_M.gguf"), "{pulled:?}");
    let file = format!("{}/org/model/blob/v1/M-Q8_0.gguf", hub.address);
    for name in ["hf.co/org/model@v1:q8_0", &file] {
        assert_eq!(run(&["pull", name]).out, path("M-Q8_0.gguf"), "{name}");
    }
    // The cache is asked for the same revision and variant.
    for (name, code) in [("org/model@v1:Q8_0", 0), (&*page, 0), ("org/model", 1)] {
        assert_eq!(run(&["show", name]).code, code, "{name}");
    }
    assert!(!run(&["show", "org/model@v1:Q8_0"]).out.contains("Q4_K_M"));
    for (args, words) in [
        (&["pull", "org/model@v1", "--revision", "v2"][..], ["org/model@v1", "--revision v2"]),
        (&["show", "org/model@v1", "--revision", "v2"], ["org/model@v1", "--revision v2"]),
        (&["pull", "org/model:Q8_0", "--include", "*.md"], ["Q8_0", "--include *.md"]),
        (&["rm", "org/model@v1", "--yes"], ["org/model@v1", "moeflux rm org/model"]),
        (&["pull", "https://huggingface.co/datasets/a/b"], ["datasets/a/b", "a data set"]),
    ] {
        let said = run(args);
        assert!(said.code == 2 && words.iter().all(|word| said.err.contains(word)), "{said:?}");
    }
    for name in ["https://huggingface.co/spaces/a/b", "https://example.com/a/b"] {
        let said = run(&["run", "--model", name, "--yes", FOX]);
        assert!(said.code == 1 && said.err.contains("not "), "{said:?}");
        assert!(!said.err.contains("folder"), "{}", said.err);
    }
}

#[test]
fn faults_of_a_server_are_one_line() {
    let (hub, folder) = (tales(), tempfile::tempdir().unwrap());
    let pull = ["pull", "org/model"];
    for (faults, words) in [
        (Faults { list_status: Some(404), ..Faults::default() }, "no such model"),
        (Faults { token: Some("hf_x".into()), ..Faults::default() }, "HF_TOKEN"),
        (Faults { flips_bytes: true, ..Faults::default() }, "again to download this file anew"),
        (Faults { listed_name: Some("../x".into()), ..Faults::default() }, "../x"),
    ] {
        hub.set(faults);
        let said = run_with(&pull, &hub, &folder);
        let errors = said.err.lines().filter(|line| line.starts_with("error: "));
        assert_eq!((said.code, errors.count()), (1, 1), "{said:?}");
        assert!(said.err.contains(words), "{}", said.err);
    }
    hub.set(Faults { status: Some((503, hub.requests() + 1)), ..Faults::default() });
    let waited = run_with(&pull, &hub, &folder);
    let line = format!("waiting for {}: status 503; next try (2 of 5)", hub.address);
    assert!(waited.code == 0 && waited.err.contains(&line), "{waited:?}");
    fs::remove_dir_all(folder.path().join("hub")).unwrap();
    hub.set(Faults { token: Some("hf_x".into()), ..Faults::default() });
    let said = said(with_hub(&pull, &hub, &folder).env("HF_TOKEN", "hf_x").output().unwrap());
    assert_eq!(said.code, 0, "{said:?}");
    let wrong = run_with(&["pull", "../x"], &hub, &folder);
    assert!(wrong.code == 2 && wrong.err.contains("ORG/NAME"), "{wrong:?}");
}

/// Kills of one pull.
const KILLS: u64 = 50;

/// Bytes of the killed pull.
const KILLED_BYTES: usize = 160 << 20;

/// Connections of the killed pull.
const CONNECTIONS: u64 = 4;

#[test]
fn a_pull_that_is_killed_goes_on() {
    let bytes: Vec<u8> = (0..KILLED_BYTES as u32 / 4).flat_map(u32::to_le_bytes).collect();
    let hub = FakeHub::start(&[("model.safetensors", bytes.clone())]);
    hub.set(Faults { pause: Some(Duration::from_millis(2)), ..Faults::default() });
    let folder = tempfile::tempdir().unwrap();
    let connections = CONNECTIONS.to_string();
    let pull = ["pull", "org/model", "--connections", &connections];
    for kill in 0..KILLS {
        let mut child = with_hub(&pull, &hub, &folder)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // At some time after the first bytes.
        let until = hub.sent() + (1 + kill * 7 % 10) * (300 << 10);
        while hub.sent() < until && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let list = run_with(&["list"], &hub, &folder);
    assert!(list.out.contains("org/model") && list.out.contains("unfinished"), "{list:?}");
    let said = run_with(&pull, &hub, &folder);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(!run_with(&["list"], &hub, &folder).out.contains("unfinished"));
    let written = fs::read(Path::new(said.out.trim_end()).join("model.safetensors")).unwrap();
    assert_eq!(tag(&written), tag(&bytes));
    let most = KILLED_BYTES as u64 + KILLS * CONNECTIONS * (8 << 20);
    assert!(hub.sent() <= most, "{} of {most}", hub.sent());
}
