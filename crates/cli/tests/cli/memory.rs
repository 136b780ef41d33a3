//! The memory plan holds: by the peak of the process, and under limits that the system enforces.

use super::*;

/// A context whose KV cache is the largest part, and a long prompt that fills it.
const SMALL: [&str; 9] =
    ["run", "--raw", "--json", "--ctx", "1024", "--chunk", "128", "--max-tokens", "24"];

/// The mapped pages of the program vary between runs by some hundred KiB.
const PROGRAM: u64 = 2 << 20;

/// Budget for everything but slots, as planned with a large budget, plus `slots` slots.
fn budget(slots: u64) -> u64 {
    succeed(&["run", "-n", "1", FOX]);
    let roomy = json(&succeed(&[&SMALL[..], &["x"]].concat()));
    let plan = |name: &str| roomy["plan"][name].as_u64().unwrap();
    plan("process")
        + plan("staging")
        + plan("dense")
        + plan("state")
        + plan("scratch")
        + slots * plan("slot")
        + PROGRAM
}

fn long_prompt() -> String {
    "The Fox and the Crow sat on a branch. ".repeat(60)
}

#[test]
fn peak_memory_stays_within_the_budget() {
    for slots in [8, 64, 200] {
        let budget = budget(slots);
        let (bytes, prompt) = (format!("{budget}B"), long_prompt());
        let said = run(&[&SMALL[..], &["--memory", &bytes, &prompt]].concat());
        assert_eq!(said.code, 0, "{said:?}");
        let peak = json(&said.out)["statistics"]["peak_memory"].as_u64().unwrap();
        assert!(peak > 0 && peak <= budget, "{peak} of {budget}");
    }
}

/// Runs with `budget` in a shell that first executes `limit`.
#[cfg(target_os = "linux")]
fn limited(limit: &str, budget: u64) -> Said {
    let (bytes, prompt) = (format!("{budget}B"), long_prompt());
    let program = moeflux([&SMALL[..], &["--memory", &bytes, &prompt]].concat());
    let mut shell = Command::new("sh");
    shell
        .args(["-c", &format!("{limit} && exec \"$@\""), "sh"])
        .arg(program.get_program())
        .args(program.get_args());
    shell
        .envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .stdin(Stdio::null());
    said(shell.output().unwrap())
}

/// Runs under `RLIMIT_DATA`, a hard limit on data mappings that needs no privileges.
#[cfg(target_os = "linux")]
#[test]
fn a_run_survives_a_limit_that_is_its_budget() {
    let budget = budget(64);
    let said = limited(&format!("ulimit -d {}", budget / 1024), budget);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(!json(&said.out)["text"].as_str().unwrap().is_empty());
}

/// Runs in a memory cgroup whose limit is the budget. Where none can be created, a line says so.
#[cfg(target_os = "linux")]
#[test]
fn a_run_survives_a_cgroup_whose_limit_is_its_budget() {
    let budget = budget(64);
    let name = format!("moeflux-test-{}", std::process::id());
    let (folder, limit) = if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
        (Path::new("/sys/fs/cgroup").join(name), "memory.max")
    } else {
        (Path::new("/sys/fs/cgroup/memory").join(name), "memory.limit_in_bytes")
    };
    let made = std::fs::create_dir(&folder).and_then(|()| {
        std::fs::write(folder.join(limit), budget.next_multiple_of(4096).to_string())
    });
    if let Err(error) = made {
        let _ = std::fs::remove_dir(&folder);
        println!("no memory cgroup can be made here ({error}): the limit on data stands in for it");
        return;
    }
    let said = limited(&format!("echo $$ > {}/cgroup.procs", folder.display()), budget);
    let _ = std::fs::remove_dir(&folder);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(json(&said.out)["statistics"]["peak_memory"].as_u64().unwrap() <= budget);
}

/// `tokenizer.json` of 262,144 tokens and twice as many merges, as the largest published ones.
fn large_tokenizer() -> String {
    const TOKENS: usize = 1 << 18;
    // GPT-2's letters of bytes: printable Latin-1, then U+0100 to U+0143.
    let latin = ('!'..='~').chain('\u{a1}'..='\u{ac}').chain('\u{ae}'..='\u{ff}');
    let mut tokens: Vec<String> = latin.chain('\u{100}'..='\u{143}').map(String::from).collect();
    let bytes = tokens.len();
    // Words of 2, 3 and 4 letters, so that every part of one is a token.
    let letters: Vec<char> = ('a'..='v').collect();
    for len in 2..=4 {
        let words = (0..letters.len().pow(len)).map(|i| {
            (0..len).map(|place| letters[i / letters.len().pow(place) % letters.len()]).collect()
        });
        tokens.extend(words);
    }
    let quote = |token: &str| serde_json::to_string(token).unwrap();
    let words = &tokens[bytes..];
    let merge = |(a, b): (&str, &str)| format!("[{},{}]", quote(a), quote(b));
    let cuts = |word: &String| [1, word.len() - 1].map(|cut| merge(word.split_at(cut)));
    let merges: Vec<String> = words.iter().flat_map(cuts).collect();
    tokens.extend((tokens.len()..TOKENS).map(|i| format!("token {i}")));
    let entry = |(id, token): (usize, &String)| format!("{}:{id}", quote(token));
    let vocab: Vec<String> = tokens.iter().enumerate().map(entry).collect();
    let level =
        r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;
    format!(
        r#"{{"version":"1.0","added_tokens":[],"pre_tokenizer":{level},"decoder":{level},"model":
            {{"type":"BPE","vocab":{{{}}},"merges":[{}]}}}}"#,
        vocab.join(","),
        merges.join(",")
    )
}

/// The advised budget holds the tokenizer, and what parsing it takes for a moment.
#[test]
fn a_large_tokenizer_is_within_the_advised_budget() {
    let folder = temp();
    let (model, config) = (folder.path().join("model"), folder.path().join("config.json"));
    let shape = serde_json::json!({
        "model_type": "qwen3_moe", "hidden_size": 64, "head_dim": 32, "intermediate_size": 64,
        "moe_intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
        "norm_topk_prob": true, "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
        "rope_theta": 1e6, "tie_word_embeddings": false, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 1 << 18,
        "quantization": {"group_size": 64, "bits": 4},
    });
    std::fs::write(&config, shape.to_string()).unwrap();
    let [model_arg, config] = [&model, &config].map(|path| path.to_str().unwrap());
    succeed(&["synth", "--config", config, "--out", model_arg]);
    std::fs::write(model.join("tokenizer.json"), large_tokenizer()).unwrap();
    let ask = |memory: &str| {
        run(&["run", "--model", model_arg, "--raw", "--json", "-n", "2", "--memory", memory, FOX])
    };
    let refused = ask("8MiB").err;
    let advised = refused.split("--memory ").nth(1).and_then(|rest| rest.split("MiB").next());
    let advised: u64 = advised.unwrap_or_else(|| panic!("{refused}")).parse().unwrap();
    let said = ask(&format!("{advised}MiB"));
    assert_eq!(said.code, 0, "{said:?}");
    let peak = json(&said.out)["statistics"]["peak_memory"].as_u64().unwrap();
    assert!(peak > 0 && peak <= advised << 20, "{peak} of {advised} MiB");
}

/// A prompt of 10 MB took 1.3 GB before it was refused.
#[cfg(target_os = "linux")]
#[test]
fn a_prompt_that_cannot_fit_takes_little_memory() {
    let prompt = "fox\n".repeat(10_000_000 / 4);
    let program = moeflux(["run", "--raw", "--memory", "100MiB", "-"]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "ulimit -d 131072 && exec \"$@\"", "sh"]).arg(program.get_program());
    shell.args(program.get_args());
    shell.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let said = fed(shell, prompt.as_bytes());
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.err.contains("context"), "{}", said.err);
}
