//! `pack`: a copy with one record per expert, and its messages.

use super::*;

#[test]
fn a_packed_model_is_used_like_any_other() {
    let temp = temp();
    let out = temp.path().join("packed");
    let out = out.to_str().unwrap();
    let said = run(&["pack", "--out", out]);
    assert_eq!((said.code, said.out.as_str()), (0, ""), "{said:?}");
    assert!(said.err.contains("256 experts packed to") && said.err.contains(out), "{said:?}");

    let shown = json(&succeed(&["inspect", "--model", out, "--json"]));
    assert_eq!((&shown["packed"], &shown["experts"]["total"]), (&true.into(), &256.into()));
    assert_eq!(json(&succeed(&["inspect", "--json"]))["packed"], false);
    assert!(succeed(&["inspect", "--model", out]).contains("one aligned record per expert"));
    let answer = ["run", "--memory", "54MiB", "--max-tokens", "24", FOX];
    assert_eq!(succeed(&[&answer[..], &["--model", out]].concat()), succeed(&answer));

    let said = run(&["pack", "--verify", out]);
    assert!(said.code == 0 && said.err.contains("everything is as it was packed"), "{said:?}");
    assert_error(&run(&["pack", "--out", out]), 1, &[out, "holds a model"]);
    let again = temp.path().join("again");
    let again = again.to_str().unwrap();
    assert_error(&run(&["pack", "--model", out, "--out", again]), 1, &[out, "packed already"]);
    assert!(!Path::new(again).exists());
}

#[test]
fn damage_is_listed_and_never_used() {
    let temp = temp();
    let source = moeflux_goldens::golden("qwen3_moe");
    let (source, out) = (source.to_str().unwrap(), temp.path().join("packed"));
    let file = out.join("experts.moeflux");
    let out = out.to_str().unwrap();
    succeed(&["pack", "--quiet", "--model", source, "--out", out]);
    let said = run(&["pack", "--verify", out, "--model", source]);
    assert!(said.code == 0 && said.err.contains("as it was in the source"), "{said:?}");

    let mut bytes = std::fs::read(&file).unwrap();
    let json_bytes = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
    for byte in bytes[(32 + json_bytes).next_multiple_of(4096)..].iter_mut().step_by(256) {
        *byte ^= 1;
    }
    std::fs::write(&file, bytes).unwrap();
    let said = run(&["pack", "--verify", out]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.out.contains("layer 0, expert 0: ") && said.out.contains("digest"), "{said:?}");
    assert!(said.err.contains("pack the model again"), "{said:?}");
    let tokens = temp.path().join("tokens.json");
    std::fs::write(&tokens, "[1, 2, 3]").unwrap();
    let logits = temp.path().join("logits.safetensors");
    let (tokens, logits) = (tokens.to_str().unwrap(), logits.to_str().unwrap());
    let said = run(&["logits", "--model", out, "--tokens", tokens, "--out", logits]);
    assert_error(
        &said,
        1,
        &["experts.moeflux: layer 0, expert", "differ from the packed ones", "pack --verify"],
    );
}

#[test]
fn folders_that_are_not_packed_are_errors() {
    let source = moeflux_goldens::golden("qwen3_moe");
    let source = source.to_str().unwrap();
    assert_error(&run(&["pack", "--verify", source]), 1, &[source, "not packed"]);
    assert_error(&run(&["pack", "--verify", "/no/such"]), 1, &["/no/such"]);
    assert_error(
        &run(&["pack", "--model", source, "--out", source]),
        1,
        &[source, "holds a model"],
    );
    assert_eq!(run(&["pack"]).code, 2);
    assert_eq!(run(&["pack", "--verify", "a", "--out", "b"]).code, 2);
}

/// Ctrl-C keeps what was packed, and the same command completes it.
#[cfg(unix)]
#[test]
fn an_interrupted_pack_is_resumed() {
    let temp = temp();
    // A run may end before the signal arrives; then another one is tried.
    for i in 0..20 {
        let out = temp.path().join(i.to_string());
        let out = out.to_str().unwrap();
        let mut child = moeflux(["pack", "--out", out]).stderr(Stdio::piped()).spawn().unwrap();
        while std::fs::read_dir(out).map_or(0, Iterator::count) < 3
            && child.try_wait().unwrap().is_none()
        {
            std::thread::yield_now();
        }
        let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).output();
        assert!(kill.is_ok());
        let said = said(child.wait_with_output().unwrap());
        if said.code == 130 {
            assert!(
                said.err.contains("stays in") && said.err.contains("goes on from there"),
                "{said:?}"
            );
            assert_error(&run(&["inspect", "--model", out]), 1, &[out, "not packed yet"]);
            succeed(&["pack", "--out", out]);
        }
        assert_eq!(run(&["pack", "--verify", out]).code, 0);
        if said.code == 130 {
            return;
        }
        assert_eq!(said.code, 0, "{said:?}");
    }
    panic!("no run was interrupted");
}
