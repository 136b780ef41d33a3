//! Runs of the benchmark, as a user sees them.

// clippy.toml allows these in functions marked as tests; their helpers are tests too.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::Path;

use super::{
    args,
    measure::{self, Streams},
};

/// Arguments for a few figures of one op. They name the device and the threads, so that no
/// environment variable changes them.
const NORM: [&str; 7] = ["--quick", "--only", "rmsnorm", "--threads", "1", "--device", "cpu"];

/// Output and exit code of a run.
#[derive(Debug)]
struct Said {
    out: String,
    err: String,
    code: i32,
}

fn run(args: &[&str]) -> Said {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let args = match args::parse(["kernels"].iter().chain(args)) {
        Ok(args) => args,
        Err(error) => {
            let err = error.render().to_string();
            return Said { out: String::new(), err, code: error.exit_code() };
        }
    };
    let mut streams = Streams { out: &mut out, err: &mut err, shows_progress: false };
    let code = measure::run(&args, &mut streams).into();
    let [out, err] = [out, err].map(|bytes| String::from_utf8(bytes).unwrap());
    Said { out, err, code }
}

/// Runs, asserts success and returns the output.
fn succeed(args: &[&str]) -> String {
    let said = run(args);
    assert_eq!(said.code, 0, "{args:?}: {said:?}");
    said.out
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// Asserts an error as users should see it: without Rust internals.
fn assert_error(said: &Said, code: i32, parts: &[&str]) {
    assert_eq!(said.code, code, "{said:?}");
    assert!(said.err.starts_with("error: "), "{said:?}");
    for part in parts {
        assert!(said.err.contains(part), "{part:?} is not in {said:?}");
    }
    for inner in ["panicked", "RUST_BACKTRACE", "Os {", "Error(", "Some("] {
        assert!(!said.err.contains(inner), "{said:?}");
    }
}

/// Asserts that no line with columns is wider than 80.
fn assert_narrow(out: &str) {
    // Sentences have single spaces.
    let wide = |line: &&str| line.trim().contains("  ") && line.chars().count() > 80;
    let wide: Vec<&str> = out.lines().filter(wide).collect();
    assert!(wide.is_empty(), "{}", wide.join("\n"));
}

/// A file that an earlier commit saved.
fn kept(name: &str) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../moeflux/tests/data/versions/1");
    folder.join(name).to_str().unwrap().to_owned()
}

#[test]
fn ops_are_measured_in_formats_and_rows() {
    let args = ["--only", "MatMul,Glu", "--format", "affine4/64", "--threads", "1", "--json"];
    let measured = json(&succeed(&[&["--quick", "--device", "cpu"], &args[..]].concat()));
    let peak = |name: &str| measured["peaks"][name].as_f64().unwrap();
    assert!(
        peak("memory") > 0.0 && peak("f32") > 0.0 && measured["peaks"]["measured"] == true,
        "{measured}"
    );
    assert!(measured["device"].as_str().unwrap().contains("1 thread,"), "{measured}");
    let figures = measured["figures"].as_array().unwrap();
    // Glu has no weights, so the format excludes it.
    assert!(
        figures.iter().all(|f| f["op"] == "MatMul" && f["format"] == "affine4/64"),
        "{measured}"
    );
    let rows = |shape: &str| -> Vec<u64> {
        figures
            .iter()
            .filter(|f| f["shape"] == shape)
            .map(|f| f["rows"].as_u64().unwrap())
            .collect()
    };
    assert_eq!(rows("2048 x 4096"), [1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 512]);
    assert_eq!((rows("512 x 2048"), rows("151936 x 2048")), (vec![1, 8, 512], vec![1]));
    for figure in figures {
        let number = |name: &str| figure[name].as_f64().unwrap();
        assert!(number("seconds") > 0.0 && number("share") > 0.0, "{figure}");
        assert!(
            number("bytes_per_second") > 0.0 && number("operations_per_second") > 0.0,
            "{figure}"
        );
        assert!(
            ["memory", "arithmetic"].contains(&figure["bound_by"].as_str().unwrap()),
            "{figure}"
        );
    }
    let shares = [1, 512]
        .map(|rows| figures.iter().find(|f| f["rows"] == rows).unwrap()["bound_by"].clone());
    assert_eq!(shares, ["memory", "arithmetic"]);
}

#[test]
fn figures_are_printed_as_table_and_csv() {
    let table = succeed(&NORM);
    assert_narrow(&table);
    assert!(table.contains("from memory") && table.contains("of the best"), "{table}");
    assert_eq!(table.lines().filter(|l| l.starts_with("RmsNorm  2048")).count(), 2, "{table}");
    let csv = succeed(&[&NORM[..], &["--csv"]].concat());
    assert!(csv.starts_with("op,shape,format,rows,seconds,"), "{csv}");
    assert!(
        csv.lines().count() == 3 && csv.lines().nth(1).unwrap().starts_with("RmsNorm,\"2048\",,1,"),
        "{csv}"
    );
}

#[test]
fn wrong_use_is_exit_code_2_and_names_the_choices() {
    for (args, parts) in [
        (["--only", "nonsense"], ["no op \"nonsense\"", "matmul"]),
        (["--format", "q4_x"], ["no weight format", "affine4/64"]),
        (["--format", "mxfp4"], ["not measured in these formats", "--help"]),
    ] {
        assert_error(&run(&[&NORM[..], &args[..]].concat()), 2, &parts);
    }
    assert_error(&run(&["--device", "abacus"]), 2, &["choose auto", "gpu:N"]);
    assert_error(&run(&["--kv", "f64"]), 2, &["possible values: f32, f16, q8"]);
    assert_error(&run(&["--tolerance", "101%", "--compare", "x"]), 2, &["from 0 to 100"]);
    assert_error(&run(&["--tolerance", "5%"]), 2, &["--compare"]);
    let help = run(&["--help"]);
    assert!(help.code == 0 && help.err.contains("--example kernels -- --quick"), "{help:?}");
}

#[test]
fn a_run_is_compared_with_a_saved_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (saved, other) = (path("saved.json"), path("other.json"));
    let measured = json(&succeed(&[&NORM[..], &["--json", "--save", &saved]].concat()));
    assert_eq!(measured, json(&std::fs::read_to_string(&saved).unwrap()));
    // The file is replaced, not overwritten: the hard link keeps the old one.
    let older = path("older.json");
    std::fs::hard_link(&saved, &older).unwrap();
    succeed(&[&NORM[..], &["--save", &saved]].concat());
    std::fs::rename(&older, &saved).unwrap();
    assert_eq!(measured, json(&std::fs::read_to_string(&saved).unwrap()));
    let compare = |file: &str, tolerance: &str| {
        run(&[&NORM[..], &["--compare", file, "--tolerance", tolerance]].concat())
    };
    let said = compare(&saved, "100%");
    assert!(said.code == 0 && said.out.contains("nothing of 2 figures is slower"), "{said:?}");

    // Another machine was a thousand times as fast.
    let mut faster = measured.clone();
    let seconds = faster["figures"][1]["seconds"].as_f64().unwrap();
    faster["figures"][1]["seconds"] = (seconds / 1e3).into();
    faster["device"] = "an abacus".into();
    faster["options"]["quick"] = false.into();
    std::fs::write(&other, faster.to_string()).unwrap();
    let said = compare(&other, "90%");
    assert!(said.code == 1 && said.out.contains("  slower\n"), "{said:?}");
    assert_narrow(&said.out);
    assert!(said.out.contains("1 of 2 figures slower by more than 90.0 %"), "{said:?}");
    assert!(
        said.out.contains(", before an abacus\n") && said.out.contains("quick: true, before false"),
        "{said:?}"
    );

    for broken in
        ["", "[1, 2", "{}", "[]", r#"{"figures": [{"op": "RmsNorm"}]}"#, r#"{"contexts": []}"#]
    {
        std::fs::write(&other, broken).unwrap();
        assert_error(&compare(&other, "10%"), 1, &[&other]);
    }
    assert_error(&compare("/no/such.json", "10%"), 1, &["/no/such.json"]);
    faster["figures"][0]["seconds"] = 0.into();
    std::fs::write(&other, faster.to_string()).unwrap();
    assert_error(&compare(&other, "10%"), 1, &["cannot be compared"]);
    faster["figures"] = serde_json::json!([]);
    std::fs::write(&other, faster.to_string()).unwrap();
    assert_error(&compare(&other, "10%"), 1, &["nothing can be compared"]);
}

#[test]
fn saved_runs_of_earlier_versions_are_compared_or_refused_by_name() {
    let compare =
        |file: &str| run(&[&NORM[..], &["--compare", file, "--tolerance", "100%"]].concat());
    let said = compare(&kept("bench-kernels.json"));
    assert!(said.code == 0 && said.out.contains("nothing of 2 figures is slower"), "{said:?}");
    let again = "`cargo run --release -p moeflux-bench --example kernels -- --save`";
    // A benchmark of a model is no report of kernels.
    let model = kept("bench.json");
    assert_error(&compare(&model), 1, &[&model, again]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("later.json").to_str().unwrap().to_owned();
    for report in [r#"{"version": "9.8.7"}"#, r#"{"budgets": [{"version": "9.8.7"}]}"#] {
        std::fs::write(&file, report).unwrap();
        let version = "it has version 9.8.7, this program reads ";
        assert_error(&compare(&file), 1, &[&file, version, again]);
    }
}
