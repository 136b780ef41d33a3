//! `inspect`, `perplexity`, `synth`.

use super::*;

#[test]
fn the_built_in_model_is_inspected() {
    let shown = json(&succeed(&["inspect", "--json"]));
    assert_eq!(shown["architecture"], "qwen3_5_moe");
    assert_eq!(shown["layers"]["total"], 8);
    assert_eq!(
        (&shown["layers"]["attention"], &shown["layers"]["delta_net"]),
        (&2.into(), &6.into())
    );
    assert_eq!(
        (&shown["experts"]["per_layer"], &shown["experts"]["top_k"]),
        (&32.into(), &4.into())
    );
    let sizes = |name: &str| shown["sizes"][name].as_u64().unwrap();
    assert_eq!(sizes("all_experts"), 8 * 32 * sizes("per_expert"));
    assert_eq!(shown["token_reads"]["experts"].as_u64().unwrap(), 8 * 4 * sizes("per_expert"));
    let routers =
        shown["tensors"].as_array().unwrap().iter().find(|t| t["kind"] == "router").unwrap();
    assert_eq!(routers["format"], "affine 8 bits, groups of 64");
    assert!(shown["plan"]["slots"].as_u64().unwrap() > 0 && shown["plan_error"].is_null());
    // All tensors add up to the file, except norms and its header.
    let bytes: u64 =
        shown["tensors"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert!(
        bytes <= sizes("dense") + sizes("all_experts")
            && sizes("dense") + sizes("all_experts") <= sizes("files")
    );

    let table = succeed(&["inspect", "--memory", "1GiB"]);
    for part in [
        "qwen3_5_moe",
        "32 per layer, 4 per token",
        "memory plan for 1 GiB",
        "256 slots, of 256 experts",
    ] {
        assert!(table.contains(part), "{part}: {table}");
    }
}

#[test]
fn page_cache_use_is_shown() {
    let said = |options: &[&str], way: &str, pages: &str| {
        let shown = succeed(&[&["inspect"], options].concat());
        assert!(
            shown.contains(&format!("experts are read {way} the system's page cache")),
            "{shown}"
        );
        let shown = json(&succeed(&[&["inspect", "--json"], options].concat()));
        assert_eq!(shown["page_cache"], pages, "{shown}");
    };
    said(&[], "through", "everything");
    said(&["--io", "direct"], "past", "nothing");
    // 578 GB, more than the memory of a test machine.
    let huge = ["--preset", "kimi-k2", "--memory", "64GiB"];
    said(&huge, "past", "nothing");
    said(&[&huge[..], &["--io", "buffered"]].concat(), "through", "everything");
    assert_eq!(
        json(&succeed(&["inspect", "--json", "--memory", "5MB"]))["page_cache"],
        serde_json::Value::Null
    );
}

#[test]
fn a_failed_plan_is_shown_and_is_no_error() {
    let shown = succeed(&["inspect", "--memory", "5MB"]);
    assert!(
        shown.contains("memory plan: there is none: a budget of 4 MiB is below the floor"),
        "{shown}"
    );
    let shown = json(&succeed(&["inspect", "--json", "--memory", "5MB"]));
    assert!(shown["plan"].is_null() && shown["plan_error"].as_str().unwrap().contains("floor"));
    // With many threads, whose scratch is large, the message advises fewer.
    for (threads, advised) in [("1", false), ("64", true)] {
        let shown =
            succeed(&["inspect", "--device", "cpu", "--memory", "5MB", "--threads", threads]);
        assert_eq!(shown.contains("lower --threads"), advised, "{shown}");
    }
}

#[test]
fn an_advised_budget_holds_the_working_set() {
    let inspect = |options: &str| {
        succeed(
            &["inspect", "--preset", "qwen3-30b-a3b", "--memory"]
                .into_iter()
                .chain(options.split(' '))
                .collect::<Vec<_>>(),
        )
    };
    // A budget at which the context is reduced, and one at which the working set fits with a
    // different context.
    for budget in ["1024MiB", "1700MiB", "2000MiB"] {
        let note = inspect(budget);
        let advised = note
            .split("from disk; --memory ")
            .nth(1)
            .and_then(|n| n.split(" would hold").next())
            .unwrap();
        let plan =
            json(&inspect(&format!("{} --json", advised.replace("with ", ""))))["plan"].clone();
        assert!(
            plan["slots"].as_u64() >= plan["working_set"].as_u64(),
            "{budget}: {advised}: {plan}"
        );
    }
}

#[test]
fn a_missing_model_is_named() {
    let said = run(&["run", "--model", "/no/such/model", "x"]);
    assert_error(&said, 1, &["/no/such/model", "cannot open the model's folder", "config.json"]);
    assert_eq!(said.err.lines().count(), 1, "{said:?}");
    let empty = temp();
    let path = empty.path().to_str().unwrap();
    assert_error(&run(&["inspect", "--model", path]), 1, &[path, "no config.json"]);
    let named = moeflux(["inspect"]).env("MOEFLUX_MODEL", path).output().unwrap();
    assert_error(&said_of(named), 1, &[path]);
}

fn said_of(output: Output) -> Said {
    super::said(output)
}

#[test]
fn a_known_text_is_predicted_better_than_an_unknown_one() {
    let folder = temp();
    let perplexity = |text: &str| {
        let file = folder.path().join("text.txt");
        std::fs::write(&file, text).unwrap();
        let measured =
            succeed(&["perplexity", "--text", file.to_str().unwrap(), "--ctx", "128", "--json"]);
        json(&measured)["perplexity"].as_f64().unwrap()
    };
    let known = fable("The Fox and the Crow");
    let backwards: Vec<&str> = known.split(' ').rev().collect();
    let (known, unknown) = (perplexity(&known), perplexity(&backwards.join(" ")));
    assert!(1.0 < known && known * 10.0 < unknown, "{known} {unknown}");

    let said = with_stdin(&["perplexity", "-"], b"A Crow was sitting on a branch of a tree.");
    assert!(said.code == 0 && said.out.starts_with("perplexity "), "{said:?}");
    assert_error(&with_stdin(&["perplexity", "--text", "-"], b""), 1, &["two tokens"]);
    for flag in [&["--text"][..], &[]] {
        let args = [&["perplexity"], flag, &["/no/such/text"]].concat();
        assert_error(&run(&args), 1, &["/no/such/text"]);
    }
    assert_error(&run(&["perplexity", "a", "--text", "b"]), 2, &["cannot be used with"]);
    assert_error(&run(&["perplexity"]), 2, &["<FILE>"]);
}

#[test]
fn a_random_checkpoint_is_written_and_runs() {
    let folder = temp();
    let config = moeflux_goldens::golden("qwen3_moe").join("config.json");
    let out = folder.path().join("random");
    let (config, out) = (config.to_str().unwrap(), out.to_str().unwrap());
    let said = run(&[
        "synth", "--config", config, "--layers", "2", "--seed", "3", "--skew", "1", "--out", out,
    ]);
    assert_eq!((said.code, said.out.as_str()), (0, ""), "{said:?}");
    assert!(said.err.contains("written to"), "{said:?}");
    let shown = json(&succeed(&["inspect", "--model", out, "--json"]));
    assert_eq!(
        (&shown["architecture"], &shown["layers"]["total"]),
        (&"qwen3_moe".into(), &2.into())
    );
    assert_eq!(
        json(&succeed(&["run", "--model", out, "--raw", "-n", "2", "--json", "x"]))["prompt_tokens"],
        1
    );
    // The folder is no longer empty.
    assert_error(&run(&["synth", "--config", config, "--out", out]), 1, &[out]);
    assert_error(
        &run(&["synth", "--config", "/no/such.json", "--out", out]),
        1,
        &["/no/such.json"],
    );
}

#[test]
fn a_preset_is_planned_without_any_file() {
    for preset in moeflux::tools::synth::presets() {
        let out = succeed(&["inspect", "--json", "--preset", preset.name, "--memory", "48GiB"]);
        let report = json(&out);
        assert!(report["layers"]["total"].as_u64().unwrap() > 12, "{out}");
        assert!(report["plan"]["slots"].as_u64().unwrap() >= 200, "{out}");
        let sizes = |key: &str| report["sizes"][key].as_u64().unwrap();
        let parts = sizes("dense") + sizes("all_experts") + sizes("row_tables");
        assert_eq!(parts, sizes("files"), "{out}");
        assert!(succeed(&["inspect", "--preset", preset.name]).contains("one token reads"));
    }
    assert_eq!(run(&["inspect", "--preset", "qwen3.5-397b-a17b", "--model", "x"]).code, 2);
}

#[test]
fn parameters_of_tables_are_counted_apart() {
    let folder = moeflux_goldens::golden("qwen4_exp_hub");
    let model = ["inspect", "--model", folder.to_str().unwrap()];
    let shown = json(&succeed(&[&model[..], &["--json"]].concat()));
    // 2304 rows of 4 numbers.
    assert_eq!(shown["parameters"]["row_tables"], 9216);
    let said = succeed(&model);
    let line = said.lines().find(|line| line.starts_with("parameters")).unwrap();
    assert!(line.ends_with("active per token, plus 9.2 K in tables of rows"), "{line}");
    let built_in = json(&succeed(&["inspect", "--json"]));
    assert_eq!(built_in["parameters"]["row_tables"], 0);
    assert!(!succeed(&["inspect"]).contains("tables of rows"));

    // All matrices are listed.
    let checkpoint = moeflux::Checkpoint::open(&folder).unwrap();
    let blueprint = moeflux::model::blueprint::Blueprint::for_checkpoint(&checkpoint).unwrap();
    let dense: u64 = blueprint.matrices().map(|matrix| matrix.file_bytes() as u64).sum();
    let listed = shown["tensors"].as_array().unwrap().iter();
    let listed: u64 = listed.map(|kind| kind["bytes"].as_u64().unwrap()).sum();
    assert_eq!(listed, dense + blueprint.experts_bytes());
}

#[test]
fn rope_is_scaled_without_an_edit_of_the_config() {
    let model = moeflux_goldens::golden("qwen3_moe");
    let model = model.to_str().unwrap();
    let positions = |scaling: &[&str]| {
        let shown = succeed(&[&["inspect", "--model", model], scaling].concat());
        let line = shown.lines().find_map(|line| line.strip_prefix("positions"));
        line.unwrap().trim().parse::<usize>().unwrap()
    };
    let trained = positions(&[]);
    assert_eq!(positions(&["--rope-scaling", "yarn:4"]), 4 * trained);
    assert_eq!(positions(&["--rope-scaling", "yarn:4:512"]), 4 * 512);
    let run_scaled = |scaling: &[&str]| {
        let args = ["run", "-q", "--raw", "--temperature", "0", "-n", "8", "--json"];
        let report = json(&succeed(&[&args, scaling, &["--model", model, "a b c d e f"]].concat()));
        report["tokens"].clone()
    };
    assert_ne!(run_scaled(&[]), run_scaled(&["--rope-scaling", "yarn:4:32"]));
    for wrong in ["yarn:x", "yarn:1", "linear:4", "yarn:4:0"] {
        let said = run(&["inspect", "--model", model, "--rope-scaling", wrong]);
        assert_error(&said, 2, &["--rope-scaling", wrong]);
    }
}

#[test]
fn a_pre_tokenizer_is_named_by_the_user() {
    let gguf = engine_data().join("gguf/qwen3moe-tiny/model.gguf");
    let gguf = gguf.to_str().unwrap();
    let ids = |pre: &[&str]| {
        let args = ["tokenize", "--ids", "--model", gguf, "1234"];
        json(&succeed(&[&args[..], pre].concat())).as_array().unwrap().len()
    };
    assert_eq!((ids(&[]), ids(&["--tokenizer-pre", "gpt-2"])), (4, 2));
    let said = run(&["inspect", "--model", gguf, "--tokenizer-pre", "qwen99"]);
    assert_error(&said, 1, &[gguf, "--tokenizer-pre", "qwen99", "qwen2"]);
    let golden = moeflux_goldens::golden("qwen3_moe");
    let said = run(&["plan", "--tokenizer-pre", "qwen2", "--model", golden.to_str().unwrap()]);
    assert_error(&said, 1, &["not a model in GGUF", "leave --tokenizer-pre out"]);
    assert_error(&run(&["inspect", "--tokenizer-pre", "qwen2"]), 2, &["give --model too"]);
    let temp = temp();
    let out = temp.path().join("packed");
    let out = out.to_str().unwrap();
    succeed(&["pack", "--model", gguf, "--tokenizer-pre", "gpt-2", "--out", out]);
    let packed = succeed(&["tokenize", "--ids", "--model", out, "1234"]);
    assert_eq!(json(&packed).as_array().unwrap().len(), 2);
}
