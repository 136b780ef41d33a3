//! State that outlives a run (`--session`, `--prefix-cache`), and the format of the KV cache.

use super::*;

const VIXEN: &str = "Tell me the fable of The Lioness and the Vixen.";

/// Folder for files that outlive runs.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(temp())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.path().join(folder)).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Total bytes of the files in a folder.
    fn bytes(&self, folder: &str) -> u64 {
        let path = |name: &String| self.0.path().join(folder).join(name);
        self.names(folder).iter().map(|name| std::fs::metadata(path(name)).unwrap().len()).sum()
    }
}

/// Runs a conversation; prints one answer per line.
fn chat(args: &[&str], lines: &[&str]) -> Said {
    let said = with_stdin(&[&["chat"], args].concat(), (lines.join("\n") + "\n").as_bytes());
    assert_eq!(said.code, 0, "{said:?}");
    said
}

#[test]
fn a_session_file_continues_verbatim() {
    // The first answer ends with an end token, the others are truncated.
    for options in [&["-n", "120"][..], &["-n", "120", "--exact"], &["-n", "9", "--kv", "q8"]] {
        let folder = Folder::new();
        let (file, questions) = (folder.path("a.session"), [VIXEN, "What then?", "And the Crow?"]);
        let whole = chat(options, &questions).out;
        let session = ["--session", &file];
        let (mut told, mut tokens) = (String::new(), 0);
        for question in questions {
            let told_now = run(&[&["run", "--json"], options, &session, &[question]].concat());
            assert_eq!(told_now.code, 0, "{told_now:?}");
            let report = json(&told_now.out);
            told += &format!("{}\n", report["text"].as_str().unwrap());
            let number = |name: &str| report["session"][name].as_u64().unwrap();
            // Nothing is computed again.
            assert_eq!(number("restored_tokens"), tokens, "{report}");
            assert_eq!(report["reused_tokens"], tokens);
            assert_eq!(
                number("computed_tokens"),
                report["prompt_tokens"].as_u64().unwrap() - tokens
            );
            assert!(number("computed_tokens") < 30, "{report}");
            assert_eq!(number("saved_bytes"), std::fs::metadata(&file).unwrap().len());
            assert!(told_now.err.contains(if tokens == 0 {
                "session: new, "
            } else {
                " tokens restored from "
            }));
            tokens = number("saved_tokens");
        }
        // `chat` splits prompts elsewhere than `run`. On the fast path that changes bits on some
        // instruction sets (AVX2 without VNNI), and a text with them.
        let is_exact = options.contains(&"--exact");
        if is_exact {
            assert_eq!(told, whole);
        }
        assert_eq!(folder.names(""), ["a.session"]);

        // Conversations in `chat` continue identically, and save the same session.
        let other = folder.path("b.session");
        let session = ["--session", &other];
        let first = chat(&[options, &session].concat(), &questions[..2]);
        let second = chat(&[options, &session].concat(), &questions[2..]);
        assert_eq!(first.out + &second.out, whole, "{options:?}");
        assert!(first.err.contains("session: saved to "), "{}", first.err);
        assert!(
            second.err.starts_with("session: ") && second.err.contains(" restored from "),
            "{}",
            second.err
        );
        let has_tokens = second.err.contains(&format!("{tokens} tokens, "));
        assert!(has_tokens || !is_exact, "{} {tokens}", second.err);
    }
}

#[test]
fn a_raw_text_in_a_session_is_continued() {
    let folder = Folder::new();
    let file = folder.path("a.session");
    let run = |text: &str| {
        json(&succeed(&["run", "--raw", "--json", "-n", "4", "--session", &file, text]))
    };
    let first = run("Once upon a time");
    let second = run(" there was");
    let all = format!("Once upon a time{} there was", first["text"].as_str().unwrap());
    let whole = json(&succeed(&["run", "--raw", "--json", "-n", "4", &all]));
    assert_eq!(
        (&second["text"], &second["prompt_tokens"]),
        (&whole["text"], &whole["prompt_tokens"])
    );
}

#[test]
fn a_stop_string_is_not_saved() {
    let folder = Folder::new();
    let (file, other) = (folder.path("a.session"), folder.path("b.session"));
    let short = json(&succeed(&["run", "--json", "--session", &file, "--stop", " Vixen", VIXEN]));
    assert_eq!(short["finish"], "stop_string");
    // The same question, and the answer as far as it was shown.
    let text = short["text"].as_str().unwrap();
    let words =
        json(&succeed(&["run", "--json", "--raw", text]))["prompt_tokens"].as_u64().unwrap();
    let prompt = short["prompt_tokens"].as_u64().unwrap();
    assert_eq!(short["session"]["saved_tokens"], prompt + words);
    let lines = [VIXEN, "What then?"];
    let straight = chat(&["--session", &other, "--stop", " Vixen", "-n", "20"], &lines);
    let resumed = succeed(&["run", "--session", &file, "--stop", " Vixen", "-n", "20", lines[1]]);
    assert_eq!(straight.out, format!("{text}\n{resumed}"));
}

#[test]
fn an_unusable_session_file_is_an_error_and_unchanged() {
    let folder = Folder::new();
    let file = folder.path("a.session");
    let run_with =
        |more: &[&str]| run(&[&["run", "-n", "3", "--session", &file], more, &[FOX]].concat());
    assert_eq!(run_with(&[]).code, 0);
    let whole = std::fs::read(&file).unwrap();
    let fails = |bytes: &[u8], more: &[&str], part: &str| {
        std::fs::write(&file, bytes).unwrap();
        for chat in [false, true] {
            let said = match chat {
                true => with_stdin(&[&["chat", "--session", &file], more].concat(), b"x\n"),
                false => run_with(more),
            };
            assert_error(&said, 1, &[&file, part]);
            assert_eq!(said.out, "");
            assert!(std::fs::read(&file).unwrap() == bytes, "{part}");
        }
    };
    fails(&whole[..whole.len() - 1], &[], "cut short");
    fails(&whole[..100], &[], "cut short");
    fails(b"dear diary", &[], "no saved session");
    fails(b"", &[], "no saved session");
    let with = |at: usize, byte: u8| {
        let mut bytes = whole.clone();
        bytes[at] = byte;
        bytes
    };
    fails(&with(8, 9), &[], "version 9");
    fails(&with(whole.len() - 1, !whole[whole.len() - 1]), &[], "damaged");
    fails(&with(40, 0), &[], "damaged");
    for other in [&["--exact"][..], &["--kv", "q8"], &["--device", "reference"]] {
        fails(&whole, other, "settings that it was saved with");
    }
    fails(&whole, &["--ctx", "16"], "context of this session is 16");
    let foreign = folder.path("foreign");
    let config = moeflux_goldens::golden("qwen3_moe").join("config.json");
    succeed(&["synth", "--quiet", "--config", config.to_str().unwrap(), "--out", &foreign]);
    fails(&whole, &["--model", &foreign], "another model");
    assert_eq!(folder.names(""), ["a.session", "foreign"]);

    // The unchanged file still works.
    assert!(run_with(&[]).err.contains("28 tokens restored"));
    let folder_as_file = folder.0.path().to_str().unwrap();
    assert_error(&run(&["run", "--session", folder_as_file, FOX]), 1, &["no saved session"]);
    assert_error(
        &run(&["run", "--session", "/no/such/folder/x", FOX]),
        1,
        &["make the folder first"],
    );
}

#[test]
fn a_session_that_fills_its_context_stays_within_the_plan() {
    let folder = Folder::new();
    let file = folder.path("a.session");
    let small = ["run", "--raw", "--json", "--ctx", "640", "--chunk", "128", "--session", &file];
    // Random text has no end token in a few tokens.
    let random = ["--temperature", "3", "--seed", "7"];
    succeed(&["run", "-n", "1", FOX]);
    let plan = json(&succeed(&[
        "run", "--raw", "--json", "--ctx", "640", "--chunk", "128", "-n", "1", "x",
    ]));
    let plan = |name: &str| plan["plan"][name].as_u64().unwrap();
    let fixed: u64 = ["process", "staging", "dense", "state", "scratch"].map(plan).iter().sum();
    let budget = format!("{}B", fixed + 40 * plan("slot") + (2 << 20));
    // With a stop string, the end of the prompt is a mark, which must be evicted.
    for more in [&[][..], &["--stop", "zebra"]] {
        let _ = std::fs::remove_file(&file);
        let args = [&small[..], &random, more, &["--memory", &budget]].concat();
        for (prompt, n) in
            [(long_prompt(7).repeat(2).as_str(), "8"), (" and", "4"), (" so", "9999")]
        {
            let said = run(&[&args[..], &["-n", n, &prompt[..prompt.len().min(2100)]]].concat());
            assert_eq!(said.code, 0, "{said:?}");
            let told = json(&said.out);
            assert_eq!(told["finish"] == "context", n == "9999", "{told}");
            let peak = told["statistics"]["peak_memory"].as_u64().unwrap();
            assert!(peak <= told["plan"]["budget"].as_u64().unwrap(), "{told}");
        }
        let said = run(&[&args[..], &["more"]].concat());
        assert_error(&said, 1, &["the session has 640 tokens", "--ctx"]);
    }
}

/// A name too long for a temporary one beside it simulates a disk that cannot be written.
#[cfg(unix)]
#[test]
fn an_answer_is_printed_even_if_its_session_cannot_be_saved() {
    let folder = Folder::new();
    let (short, long) = (folder.path("a.session"), folder.path(&"s".repeat(250)));
    let told = succeed(&["run", "-n", "3", FOX]);
    let said = run(&["run", "-n", "3", "--session", &long, FOX]);
    assert_eq!((said.code, &said.out), (1, &told), "{said:?}");
    assert!(
        said.err.contains("error: the session is not saved") && said.err.contains("is as it was")
    );
    assert!(!Path::new(&long).exists());

    succeed(&["run", "-n", "3", "--session", &short, FOX]);
    std::fs::rename(&short, &long).unwrap();
    let before = std::fs::read(&long).unwrap();
    let said = run(&["run", "-n", "3", "--json", "--session", &long, FOX]);
    assert_eq!(said.code, 1, "{said:?}");
    let session = &json(&said.out)["session"];
    assert!(session["restored_tokens"] == 28 && session["saved_bytes"].is_null(), "{session}");
    let said = with_stdin(&["chat", "-n", "3", "--session", &long], b"One.\nTwo.\n");
    assert_eq!((said.code, said.out.lines().count()), (1, 2), "{said:?}");
    assert_eq!(said.err.matches("error: the session is not saved").count(), 2, "{said:?}");
    assert!(std::fs::read(&long).unwrap() == before);
}

#[test]
fn a_session_is_saved_even_if_stdout_is_closed() {
    let folder = Folder::new();
    for (command, input) in [("run", ""), ("chat", "Once upon a time\n")] {
        let file = folder.path(command);
        let mut program = moeflux([command, "-n", "3", "--ctx", "256", "--session", &file]);
        program.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            program.args((command == "run").then_some("Once upon a time")).spawn().unwrap();
        drop(child.stdout.take());
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), input.as_bytes()).unwrap();
        let said = said(child.wait_with_output().unwrap());
        assert_eq!(said.code, 0, "{said:?}");
        assert!(Path::new(&file).exists(), "{command}: {said:?}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_answer_is_saved_in_the_session() {
    use std::io::Read;

    let folder = Folder::new();
    let file = folder.path("a.session");
    let slow = [
        "run",
        "--device",
        "reference",
        "--raw",
        "--ctx",
        "256",
        "--session",
        &file,
        "Once upon a time",
    ];
    let mut child = moeflux(slow).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    let mut told = vec![0];
    stdout.read_exact(&mut told).unwrap();
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    stdout.read_to_end(&mut told).unwrap();
    let said = said(child.wait_with_output().unwrap());
    assert_eq!(said.code, 0, "{said:?}");
    for part in ["interrupted", "the session has the answer as far as it came", "saved"] {
        assert!(said.err.contains(part), "{part}: {said:?}");
    }
    // The formats are equal, so the session continues on another device.
    let on = ["run", "--json", "--kv", "f32", "--raw", "-n", "1", "--session", &file, "."];
    let restored = json(&succeed(&on))["session"]["restored_tokens"].as_u64().unwrap();
    assert!(restored > 4 && restored < 200, "{restored}");
}

#[test]
fn chat_commands_respect_a_session_file() {
    let folder = Folder::new();
    let (file, text) = (folder.path("a.session"), folder.path("talk.json"));
    let args = ["-n", "6", "--session", &file];
    let first = chat(&[&args[..], &["--system", "You are a pirate."]].concat(), &[FOX]);
    let again = chat(
        &[&args[..], &["--system", "You are a parrot."]].concat(),
        &["What then?", "/system", &format!("/save {text}"), "/reset", FOX],
    );
    assert!(again.err.contains("note: --system has no effect"), "{again:?}");
    assert!(
        again.err.contains("what was said before the session was restored is not there"),
        "{again:?}"
    );
    assert!(
        again.err.contains("forgotten; ") && again.err.contains("until the next answer"),
        "{again:?}"
    );
    let lines: Vec<&str> = again.out.lines().collect();
    assert_eq!(lines[1], "there is no system message");
    // After /reset, earlier messages and the system message are forgotten.
    assert_eq!(format!("{}\n", lines[2]), succeed(&["run", "-n", "6", FOX]), "{first:?} {again:?}");
    assert_eq!(json(&std::fs::read_to_string(&text).unwrap()).as_array().unwrap().len(), 2);
    let said = with_stdin(&[&["chat"], &args[..]].concat(), b"/system You are a parrot.\nAnd?\n");
    assert_error(&said_after_note(said), 1, &["goes on with what it began with", "/reset"]);
}

/// Drops lines before the error, such as the note on the session.
fn said_after_note(mut said: Said) -> Said {
    said.err =
        said.err.lines().skip_while(|l| !l.starts_with("error: ")).collect::<Vec<_>>().join("\n");
    said
}

/// Prompt of about 400 tokens.
fn long_prompt(number: usize) -> String {
    format!("Story {number}: {}", "The Fox and the Crow sat on a branch. ".repeat(40))
}

#[test]
fn a_cached_prompt_is_not_computed_again() {
    let folder = Folder::new();
    let (cache, prompt) = (folder.path("cache"), long_prompt(1));
    let args = ["run", "--raw", "--json", "-n", "8", "--prefix-cache", &cache];
    let first = json(&succeed(&[&args[..], &[&prompt]].concat()));
    let tokens = first["prompt_tokens"].as_u64().unwrap();
    let kept = &first["prefix_cache"];
    assert!(tokens > 300 && first["reused_tokens"] == 0 && kept["restored_tokens"] == 0, "{first}");
    assert_eq!(
        (&kept["computed_tokens"], &first["statistics"]["prefill"]["tokens"]),
        (&tokens.into(), &tokens.into())
    );
    assert_eq!(kept["saved_bytes"], folder.bytes("cache"));

    let said = run(&[&args[..], &[&prompt]].concat());
    let again = json(&said.out);
    assert_eq!(again["tokens"], first["tokens"]);
    let kept = &again["prefix_cache"];
    assert_eq!(
        (&kept["restored_tokens"], &kept["computed_tokens"]),
        (&tokens.into(), &0.into()),
        "{again}"
    );
    assert!(again["reused_tokens"] == tokens && kept["saved_bytes"].is_null(), "{again}");
    assert_eq!(again["statistics"]["prefill"]["tokens"], 0);
    assert!(
        said.err
            .contains(&format!("prompt: {tokens} tokens restored from {cache}, 0 computed, in ")),
        "{said:?}"
    );

    // A short continuation is computed and not cached.
    let longer = json(&succeed(&[&args[..], &[&format!("{prompt} And then")]].concat()));
    let computed = longer["prefix_cache"]["computed_tokens"].as_u64().unwrap();
    assert!(
        (1..20).contains(&computed) && longer["reused_tokens"].as_u64().unwrap() > 300,
        "{longer}"
    );
    // Other settings have separate cached prompts.
    let exact = json(&succeed(&[&args[..], &["--exact", &prompt]].concat()));
    assert_eq!(exact["reused_tokens"], 0, "{exact}");
    assert_eq!(folder.names("cache").len(), 2);

    // Damaged files are ignored.
    for name in folder.names("cache") {
        std::fs::write(Path::new(&cache).join(name), "dear diary").unwrap();
    }
    let anew = json(&succeed(&[&args[..], &[&prompt]].concat()));
    assert!(anew["tokens"] == first["tokens"] && anew["reused_tokens"] == 0, "{anew}");
}

#[test]
fn the_prefix_cache_stays_within_its_size() {
    let folder = Folder::new();
    let cache = folder.path("cache");
    let args = [
        "run",
        "--raw",
        "--json",
        "-n",
        "1",
        "--prefix-cache",
        &cache,
        "--prefix-cache-size",
        "2MB",
    ];
    for number in 0..4 {
        let told = json(&succeed(&[&args[..], &[&long_prompt(number)]].concat()));
        assert!(told["prefix_cache"]["saved_bytes"].as_u64().is_some(), "{told}");
        assert!(folder.bytes("cache") <= 2_000_000);
    }
    let kept = folder.names("cache").len();
    assert!((1..4).contains(&kept), "{kept}");
    // The last prompt is cached, the first one was evicted.
    for (number, reused) in [(3, true), (0, false)] {
        let told = json(&succeed(&[&args[..], &[&long_prompt(number)]].concat()));
        assert_eq!(told["reused_tokens"].as_u64().unwrap() > 0, reused, "{told}");
    }
    // A smaller limit applies immediately, also to a run that caches nothing.
    succeed(&["run", "-n", "1", "--prefix-cache", &cache, "--prefix-cache-size", "1KB", FOX]);
    assert_eq!(folder.bytes("cache"), 0);
    // A short prompt is not cached.
    let empty = folder.path("empty");
    succeed(&["run", "-n", "1", "--prefix-cache", &empty, FOX]);
    assert!(folder.names("empty").is_empty());
    let file = folder.path("file");
    std::fs::write(&file, "").unwrap();
    assert_error(
        &run(&["run", "--prefix-cache", &file, FOX]),
        1,
        &[&file, "folder of saved sessions"],
    );
}

#[test]
fn chat_uses_the_prefix_cache() {
    let folder = Folder::new();
    let cache = folder.path("cache");
    let question = long_prompt(5);
    let prefill = || {
        let said = chat(&["-n", "4", "--prefix-cache", &cache], &[&question, "/stats"]);
        let (answer, stats) = said.out.trim_end().split_once('\n').unwrap();
        (answer.to_owned(), stats.contains("prefill "))
    };
    let (first, computed) = prefill();
    assert!(computed && folder.names("cache").len() == 1);
    assert_eq!(prefill(), (first, false));
}

/// Prompt tokens that a conversation computed in total.
fn prefilled(args: &[&str], lines: &[&str]) -> u64 {
    let said = chat(&[&["-n", "6"], args].concat(), &[lines, &["/stats"]].concat());
    let (_, prefill) = said.out.split_once("prefill ").unwrap();
    prefill.split(' ').next().unwrap().parse().unwrap()
}

/// The model has recurrent layers: it continues only from marks.
#[test]
fn a_reset_conversation_reuses_its_system_message() {
    let system = long_prompt(3);
    let system = ["--system", &system];
    let with = |lines: &[&str]| prefilled(&system, lines);
    let (first, second) = (with(&[FOX]), with(&[VIXEN]));
    let both = with(&[FOX, "/reset", VIXEN]);
    assert!(both + 100 < first + second, "{both} of {first} and {second}");
    // A follow-up question computes the question and its template tokens.
    let on = with(&[FOX, VIXEN]);
    assert!(on < first + 40, "{on} of {first}");
}

#[test]
fn templates_that_drop_thoughts_recompute_one_turn_only() {
    let folder = Folder::new();
    let model = folder.path("thinking");
    std::fs::create_dir(&model).unwrap();
    let tales = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tales/model");
    for entry in std::fs::read_dir(&tales).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), Path::new(&model).join(entry.file_name())).unwrap();
    }
    let template = Path::new(&model).join("chat_template.jinja");
    let plain = std::fs::read_to_string(&template).unwrap();
    let thinking =
        plain.replace(r"<|im_start|>assistant\n' }}", r"<|im_start|>assistant\n<think>\n' }}");
    assert_ne!(plain, thinking);
    std::fs::write(&template, thinking).unwrap();
    let question = long_prompt(3);
    let (saved, with) =
        (folder.path("talk.json"), |lines: &[&str]| prefilled(&["--model", &model], lines));
    let first = with(&[&question, &format!("/save {saved}")]);
    let second = with(&[&format!("/load {saved}"), VIXEN]);
    assert!(second > first);
    let both = with(&[&question, VIXEN]);
    // The whole first prompt is reused, except the start of the answer.
    assert!(second <= both && both < second + 16, "{both} of {first} and {second}");
}

#[test]
fn the_kv_cache_has_the_requested_format() {
    let state = |more: &[&str]| {
        let shown = json(&succeed(&[&["inspect", "--json"], more].concat()));
        shown["plan"]["state"].as_u64().unwrap()
    };
    let [f32s, f16s, q8s] = ["f32", "f16", "q8"].map(|kv| state(&["--kv", kv]));
    assert!(f32s > f16s && f16s > q8s, "{f32s} {f16s} {q8s}");
    assert_eq!((state(&[]), state(&["--exact"])), (f16s, f32s));
    let told = fable("The Fox and the Crow") + "\n";
    for kv in ["f32", "f16", "q8"] {
        assert_eq!(succeed(&["run", "--kv", kv, FOX]), told, "{kv}");
    }
    assert_eq!(succeed(&["run", "--exact", "--kv", "f32", "-n", "3", FOX]), "A Crow\n");
    for args in [&["run", FOX][..], &["chat"], &["perplexity", "--text", "/dev/null"]] {
        let said = run(&[args, &["--exact", "--kv", "q8"]].concat());
        assert_error(&said, 1, &["exact", "f32", "q8"]);
    }
    assert_error(&run(&["bench", "--kv", "q4"]), 2, &["--kv", "f16", "f32", "q8"]);
}

#[test]
fn a_session_is_saved_in_fewer_bits() {
    let folder = Folder::new();
    let [whole, small] = ["whole.session", "small.session"].map(|name| folder.path(name));
    let told = |file: &str, more: &[&str]| {
        let args = ["run", "--json", "-n", "20", "--session", file];
        json(&succeed(&[&args[..], more, &[VIXEN]].concat()))
    };
    let keys = ["--session-kv", "q8"];
    told(&whole, &[]);
    told(&small, &keys);
    let bytes = |file: &str| std::fs::metadata(file).unwrap().len();
    assert!(bytes(&small) < bytes(&whole));
    let on = told(&whole, &[]);
    assert_eq!(on["session"]["restored_lossy"], false);
    // Restoring needs no option. The restored state is rounded, whatever format it is saved in
    // next.
    for more in [&[][..], &keys] {
        let on = told(&small, more);
        assert!(
            on["session"]["restored_lossy"] == true && on["session"]["restored_tokens"] != 0,
            "{on}"
        );
    }
    let said = run(&["run", "-n", "1", "--session", &small, "x"]);
    assert!(said.code == 0 && said.err.contains("saved in fewer bits"), "{said:?}");
    let before = std::fs::read(&small).unwrap();
    let wider = run(&["run", "--session", &small, "--session-kv", "f32", FOX]);
    assert_error(&wider, 2, &["--session-kv f32", "f16"]);
    assert_error(&run(&["run", "--session-kv", "q8", FOX]), 2, &["--session"]);
    assert_error(&run(&["run", "--session", &small, "--session-kv", "q4", FOX]), 2, &["f16", "q8"]);
    assert_eq!(std::fs::read(&small).unwrap(), before);
}

#[test]
fn a_session_file_saves_which_experts_are_in_memory() {
    let folder = Folder::new();
    let [cold, warm] = ["cold.session", "warm.session"].map(|name| folder.path(name));
    let told = |file: &str, more: &[&str], prompt: &str| {
        let args =
            ["run", "--json", "--slots", "200", "--prefetch", "off", "-n", "9", "--session", file];
        json(&succeed(&[&args[..], more, &[prompt]].concat()))
    };
    told(&cold, &[], VIXEN);
    told(&warm, &["--session-experts"], VIXEN);
    let [cold, warm] = [cold, warm].map(|file| told(&file, &[], "What then?"));
    assert_eq!(warm["text"], cold["text"]);
    let read =
        |told: &serde_json::Value| told["statistics"]["prefill"]["experts_read"].as_u64().unwrap();
    assert!(read(&warm) < read(&cold) / 2, "{} and {}", read(&warm), read(&cold));
    assert_error(&run(&["run", "--session-experts", FOX]), 2, &["--session"]);
}

#[test]
fn prefix_memory_is_a_line_of_the_plan() {
    let asked = ["inspect", "--memory", "400MiB", "--prefix-memory"];
    let plan =
        |size: &str| json(&succeed(&[&asked[..], &[size, "--json"]].concat()))["plan"].clone();
    assert_eq!(plan("64MiB")["marks"], 64 << 20);
    assert_eq!(plan("0")["marks"], 0);
    assert!(succeed(&[&asked[..], &["64MiB"]].concat()).contains("prefix cache"));
    let refused = run(&["run", "--memory", "200MiB", "--prefix-memory", "1GiB", "x"]);
    let words = ["below the floor", "1024 for the prefix cache", "lower --prefix-memory"];
    assert_error(&refused, 1, &words);
    assert_error(&run(&["run", "--prefix-memory", "much", "x"]), 2, &["--prefix-memory"]);
}

#[test]
fn state_memory_limits_the_kv_cache() {
    let with = |state: &str| {
        run(&["run", "--raw", "-n", "2", "--state-memory", state, "Once upon a time"])
    };
    assert_eq!(with("64MiB").code, 0);
    assert_error(
        &with("4KiB"),
        1,
        &["do not fit the memory plan", "more memory for them (--state-memory)"],
    );
}
