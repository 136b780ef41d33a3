//! Files of earlier commits that only the program reads. The engine's tests have the others.

use super::*;

fn kept(name: &str) -> String {
    engine_data().join("versions/1").join(name).to_str().unwrap().to_owned()
}

/// The model of the kept files.
fn model() -> String {
    moeflux_goldens::golden("qwen3_moe_nvfp4").to_str().unwrap().to_owned()
}

#[test]
fn saved_benchmarks_are_compared() {
    let (model, saved) = (model(), kept("bench.json"));
    let args = ["bench", "--model", &model, "--prompt", "4", "--tokens", "4", "--repeat", "1"];
    let said = run(&[&args[..], &["--compare", &saved, "--tolerance", "100%"]].concat());
    assert!(said.code == 0 && said.out.contains("nothing of 2 figures is slower"), "{said:?}");
    // Keys that were renamed later are found.
    let before = json(&std::fs::read_to_string(&saved).unwrap());
    assert_eq!(before["options"]["look_ahead"], "auto");
    assert!(!said.out.contains("look ahead") && !said.out.contains("prefetch:"), "{said:?}");

    let planned =
        ["plan", "--model", &model, "--disk", "1GB/s", "--ram", "10GB/s", "--measured", &saved];
    let planned = run(&planned);
    assert_eq!(planned.code, 0, "{planned:?}");

    // A benchmark of single ops is no report of a model.
    let kernels = kept("bench-kernels.json");
    assert_error(&run(&["bench", "--compare", &kernels]), 1, &[&kernels, "bench --save"]);
}

#[test]
fn unreadable_benchmarks_of_other_versions_are_refused_by_name() {
    let folder = temp();
    let file = folder.path().join("later.json").to_str().unwrap().to_owned();
    let model = model();
    let bench = ["bench", "--model", &model, "--compare", &file];
    let plan = ["plan", "--model", &model, "--measured", &file];
    for report in [r#"{"version": "9.8.7"}"#, r#"{"budgets": [{"version": "9.8.7"}]}"#] {
        std::fs::write(&file, report).unwrap();
        let version = "it has version 9.8.7, this program reads ";
        assert_error(&run(&bench), 1, &[&file, version, "`moeflux bench --save`"]);
        assert_error(&run(&plan), 1, &[&file, version, "`moeflux bench --save`"]);
    }
}

#[test]
fn a_conversation_is_loaded() {
    let folder = temp();
    let (saved, again) = (kept("conversation.json"), folder.path().join("again.json"));
    let said = with_stdin(
        &["chat", "--quiet"],
        format!("/load {saved}\n/save {}\n", again.display()).as_bytes(),
    );
    assert_eq!(said.code, 0, "{said:?}");
    let [saved, again] =
        [Path::new(&saved), &again].map(|path| json(&std::fs::read_to_string(path).unwrap()));
    assert_eq!(again, saved);
    assert_eq!(saved[1]["role"], "assistant");
}
