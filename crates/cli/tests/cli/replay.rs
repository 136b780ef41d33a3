//! `--trace` and `replay`.

use super::*;

fn traced(folder: &Path, more: &[&str]) -> (String, String) {
    let file = folder.join("fox.trace").to_str().unwrap().to_owned();
    let out = succeed(&[&["run", "--quiet", "--trace", &file], more, &[FOX]].concat());
    (file, out)
}

/// The simulator counts what the cache does.
#[test]
fn a_replay_counts_as_the_run_did() {
    let folder = temp();
    for policy in ["lru", "s3-fifo", "lfu"] {
        for slots in ["24", "96"] {
            let options = ["--json", "--slots", slots, "--look-ahead", "off", "--policy", policy];
            // Direct reads are of whole blocks, of more bytes than the experts have.
            let options = [&options[..], &["--io", "buffered"]].concat();
            let (file, out) = traced(folder.path(), &options);
            let ran = json(&out);
            assert_eq!(
                ran["text"].as_str().unwrap().trim_end(),
                fable("The Fox and the Crow").trim_end()
            );
            let replayed =
                json(&succeed(&["replay", &file, "--slots", slots, "--policy", policy, "--json"]));
            assert_eq!(replayed["is_cut"], false);
            assert_eq!(
                replayed["replayed"].as_array().unwrap().len(),
                2,
                "the policy and the optimum"
            );
            let row = &replayed["replayed"][0];
            assert_eq!(row["policy"], policy);
            for phase in ["prefill", "decode"] {
                let ran = &ran["statistics"][phase];
                assert_eq!(row[phase]["tokens"], ran["tokens"], "{policy}, {slots} slots, {phase}");
                assert_eq!(
                    row[phase]["bytes_missed"], ran["bytes_read"],
                    "{policy}, {slots} slots, {phase}"
                );
            }
            let optimum = &replayed["replayed"][1];
            assert_eq!(optimum["policy"], "optimum");
            assert!(optimum["decode"]["hit_rate"].as_f64() > row["decode"]["hit_rate"].as_f64());
        }
    }
}

#[test]
fn tracing_changes_no_output_and_a_replay_is_printed_and_plotted() {
    let folder = temp();
    let (file, text) = traced(folder.path(), &[]);
    assert_eq!(text.trim_end(), fable("The Fox and the Crow").trim_end());
    let plot = folder.path().join("fox.svg");
    let table = succeed(&["replay", &file, "--plot", plot.to_str().unwrap()]);
    tables::assert_narrow(&table);
    for part in
        ["tales-18m", "hit rate of decode", "read per token of decode", "lru", "optimum", "100 %"]
    {
        assert!(table.contains(part), "{part:?} is not in {table}");
    }
    let svg = std::fs::read_to_string(plot).unwrap();
    assert!(
        svg.starts_with("<svg") && svg.contains("optimum") && svg.contains("Hit rate of decode")
    );
    let csv = succeed(&["replay", &file, "--csv", "--slots", "64,32"]);
    let lines: Vec<&str> = csv.lines().collect();
    assert_eq!(
        lines[0],
        "policy,slots,slot_bytes,phase,tokens,needed,hits,bytes_missed,hit_rate,bytes_per_token"
    );
    assert_eq!(lines.len(), 1 + 4 * 2 * 2, "three policies and the optimum, two sizes, two phases");
    assert!(lines[1].starts_with("lru,32,") && lines[3].starts_with("lru,64,"), "{csv}");
    let trace = &json(&succeed(&["replay", &file, "--json"]))["trace"];
    let budget = trace["fixed"].as_u64().unwrap() + 50 * trace["slot"].as_u64().unwrap();
    let budgets =
        json(&succeed(&["replay", &file, "--json", "--budgets", &format!("1TiB,{budget}B")]));
    assert_eq!(budgets["replayed"][0]["slots"], 50);
    assert_eq!(budgets["replayed"][1]["slots"], budgets["experts"], "a budget for all of them");
}

#[test]
fn chat_and_bench_are_traced() {
    let folder = temp();
    let file = folder.path().join("a.trace").to_str().unwrap().to_owned();
    succeed(&[
        "bench", "--quiet", "--prompt", "5", "--tokens", "3", "--repeat", "2", "--trace", &file,
    ]);
    let replayed = json(&succeed(&["replay", &file, "--json"]));
    assert_eq!((&replayed["steps"], &replayed["tokens"]), (&8.into(), &16.into()));
    let said = with_stdin(&["chat", "--quiet", "-n", "4", "--trace", &file], b"Hello\n");
    assert_eq!(said.code, 0, "{said:?}");
    assert!(json(&succeed(&["replay", &file, "--json"]))["steps"].as_u64() > Some(1));
}

#[test]
fn invalid_traces_and_sizes_are_errors() {
    let folder = temp();
    let (file, _) = traced(folder.path(), &["-n", "3"]);
    let bytes = std::fs::read(&file).unwrap();
    let cut = folder.path().join("cut.trace").to_str().unwrap().to_owned();
    std::fs::write(&cut, &bytes[..bytes.len() - 1]).unwrap();
    let said = run(&["replay", &cut]);
    assert!(said.code == 0 && said.err.contains("ends within a step"), "{said:?}");

    let other = folder.path().join("other").to_str().unwrap().to_owned();
    std::fs::write(&other, "something else").unwrap();
    assert_error(&run(&["replay", &other]), 1, &[&other, "not a routing trace", "--trace"]);
    assert_error(
        &run(&["replay", "nowhere.trace"]),
        1,
        &["nowhere.trace: cannot open the routing trace"],
    );
    assert_error(&run(&["replay", &file, "--slots", "3"]), 2, &["3 slots", "a layer needs 4"]);
    assert_error(&run(&["replay", &file, "--slots", "9999"]), 2, &["9999 slots", "256 experts"]);
    assert_error(
        &run(&["replay", &file, "--budgets", "1MiB"]),
        2,
        &["a budget of 1 MiB", "the floor"],
    );
    assert_error(&run(&["replay", &file, "--policy", "mru"]), 2, &["mru", "lru, s3-fifo, lfu"]);
    assert_error(
        &run(&["run", "--trace", "/nowhere/a.trace", FOX]),
        1,
        &["/nowhere/a.trace: cannot write"],
    );
}
