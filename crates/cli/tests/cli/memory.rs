//! The memory plan holds: by the peak of the process, and under limits that the system enforces.

#[cfg(target_os = "linux")]
use std::sync::atomic::{AtomicUsize, Ordering};

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

/// A memory cgroup, removed when it is dropped.
#[cfg(target_os = "linux")]
struct MemoryGroup(PathBuf);

#[cfg(target_os = "linux")]
impl MemoryGroup {
    /// A group with a limit. Where none can be made, a line says so.
    #[allow(clippy::print_stdout, reason = "a skipped limit is told")]
    fn new(limit: u64, stand_in: &str) -> Option<Self> {
        static GROUPS: AtomicUsize = AtomicUsize::new(0);
        let number = GROUPS.fetch_add(1, Ordering::Relaxed);
        let name = format!("moeflux-test-{}-{number}", std::process::id());
        let (folder, file) = if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            (Path::new("/sys/fs/cgroup").join(name), "memory.max")
        } else {
            (Path::new("/sys/fs/cgroup/memory").join(name), "memory.limit_in_bytes")
        };
        let group = Self(folder);
        let made = std::fs::create_dir(&group.0).and_then(|()| {
            std::fs::write(group.0.join(file), limit.next_multiple_of(4096).to_string())
        });
        if let Err(error) = &made {
            println!("no memory cgroup can be made here ({error}): {stand_in} stands in for it");
        }
        made.is_ok().then_some(group)
    }

    /// Shell command that moves the shell into the group.
    fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs", self.0.display())
    }
}

#[cfg(target_os = "linux")]
impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Runs in a memory cgroup whose limit is the budget.
#[cfg(target_os = "linux")]
#[test]
fn a_run_survives_a_cgroup_whose_limit_is_its_budget() {
    let budget = budget(64);
    let Some(group) = MemoryGroup::new(budget, "the limit on data") else { return };
    let said = limited(&group.enter(), budget);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(json(&said.out)["statistics"]["peak_memory"].as_u64().unwrap() <= budget);
}

/// Sends several equal bodies at once. Returns the status of each.
#[cfg(target_os = "linux")]
fn at_once(address: &str, path: &str, body: &[u8], count: usize) -> Vec<u16> {
    use std::{io::Read, io::Write, net::TcpStream};
    let send = || -> u16 {
        let mut client = TcpStream::connect(address).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
        write!(client, "{head}Content-Length: {}\r\n\r\n", body.len()).unwrap();
        client.write_all(body).unwrap();
        let mut reply = String::new();
        client.read_to_string(&mut reply).unwrap();
        reply.split(' ').nth(1).unwrap_or_else(|| panic!("{reply:?}")).parse().unwrap()
    };
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..count).map(|_| scope.spawn(send)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    })
}

/// A server keeps its budget whatever bodies it is sent.
#[cfg(target_os = "linux")]
#[test]
fn a_server_survives_a_cgroup_whose_limit_is_its_budget() {
    use std::io::{BufRead, BufReader};
    const MEMORY: u64 = 320 << 20;
    let chat = |more: &str| {
        let message = r#"{"role": "user", "content": "Hello"}"#;
        format!(r#"{{"max_tokens": 1, "messages": [{message}], {more}}}"#).into_bytes()
    };
    let list = |value: &str, bytes: usize| vec![value; bytes / (value.len() + 1)].join(",");
    let property = |i: usize| format!(r#""p{i}": {{"type": "string", "enum": ["a", "b"]}}"#);
    let properties: Vec<String> = (0..100).map(property).collect();
    let parameters = format!(r#"{{"type": "object", "properties": {{{}}}}}"#, properties.join(","));
    let function = format!(r#"{{"name": "f", "parameters": {parameters}}}"#);
    let tool = format!(r#"{{"type": "function", "function": {function}}}"#);
    // Each kind of body, and how many at once.
    let bodies = [
        ("/v1/chat/completions", chat(&format!(r#""x": [{}]"#, list("0", 10 << 20))), 2),
        ("/v1/chat/completions", chat(&format!(r#""tools": [{}]"#, list(&tool, 1_200_000))), 8),
        ("/v1/completions", format!(r#"{{"prompt": [{}]}}"#, list("1", 2 << 20)).into(), 8),
        ("/tokenize", format!(r#"{{"content": "{}"}}"#, "a 0 ".repeat(1 << 15)).into(), 8),
        (
            "/v1/chat/completions",
            format!(r#"{{"messages": [{}]}}"#, list(r#"{"role": "user"}"#, 2 << 20)).into(),
            8,
        ),
    ];
    let memory = format!("{MEMORY}B");
    let program = moeflux(["serve", "--quiet", "--port", "0", "--memory", &memory]);
    let group = MemoryGroup::new(MEMORY, "the peak of the process");
    let enter = group.as_ref().map_or_else(|| "true".to_owned(), MemoryGroup::enter);
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{enter} && exec \"$@\""), "sh"]).arg(program.get_program());
    shell.args(program.get_args());
    shell.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let mut server = shell.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let address = line.split_once("http://").unwrap().1.split_once("/v1").unwrap().0;
    for (path, body, count) in &bodies {
        for status in at_once(address, path, body, *count) {
            assert!([200, 400, 413, 503].contains(&status), "{path}: {status}");
        }
        // Others are answered.
        assert_eq!(at_once(address, "/v1/chat/completions", &chat(r#""n": 1"#), 1), [200]);
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak << 10 <= MEMORY, "{peak} KiB");
    server.kill().unwrap();
    server.wait().unwrap();
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
