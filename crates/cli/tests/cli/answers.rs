//! `run` and `chat`.

use std::{
    io::Read,
    process::{Child, Stdio},
};

use super::*;

#[test]
fn a_fable_is_recited_verbatim_and_statistics_follow() {
    let said = run(&["run", FOX]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(said.out, fable("The Fox and the Crow") + "\n");
    let lines: Vec<&str> = said.err.lines().collect();
    assert_eq!(lines.len(), 1, "{said:?}");
    for part in [
        "prefill 25 tokens at ",
        "; decode ",
        " tok/s; ",
        " read per token; ",
        "hit rate ",
        "peak memory ",
        "; on cpu, ",
    ] {
        assert!(lines[0].contains(part), "{part}: {said:?}");
    }
}

#[test]
fn a_budget_smaller_than_the_experts_changes_the_hit_rate_and_not_the_answer() {
    // Unpacking the built-in model maps its pages, which the plan of that run would include.
    succeed(&["run", "-n", "1", FOX]);
    let roomy = json(&succeed(&["run", "--json", "--ctx", "256", "--chunk", "64", FOX]));
    let plan = |name: &str| roomy["plan"][name].as_u64().unwrap();
    let budget = plan("process")
        + plan("staging")
        + plan("dense")
        + plan("state")
        + plan("scratch")
        + 110 * plan("slot");
    let budget = format!("{budget}B");
    let tight =
        succeed(&["run", "--json", "--ctx", "256", "--chunk", "64", "--memory", &budget, FOX]);
    let tight = json(&tight);
    assert_eq!(tight["text"], fable("The Fox and the Crow"));
    assert_eq!(tight["tokens"], roomy["tokens"]);
    assert_eq!(tight["finish"], "end_token");
    let statistics = &tight["statistics"];
    assert!(tight["plan"]["slots"].as_u64().unwrap() < 200, "{tight}");
    assert!(statistics["hit_rate"].as_f64().unwrap() < 1.0, "{tight}");
    assert!(statistics["decode"]["tokens_per_second"].as_f64().unwrap() > 0.0);
    assert!(statistics["bytes_per_token"].as_f64().unwrap() > 0.0);
    assert!(
        statistics["peak_memory"].as_u64().unwrap() <= tight["plan"]["budget"].as_u64().unwrap()
    );
}

#[test]
fn quiet_prints_nothing_and_json_is_one_object() {
    let said = run(&["run", "-q", "--json", "-n", "3", FOX]);
    assert_eq!((said.code, said.err.as_str()), (0, ""), "{said:?}");
    let object = json(&said.out);
    assert_eq!(object["text"], "A Crow");
    assert_eq!(object["tokens"].as_array().unwrap().len(), 3);
    assert_eq!(object["finish"], "max_tokens");
    assert_eq!(object["sampling"]["temperature"], 0.0);
}

#[test]
fn a_prompt_is_read_from_standard_input() {
    let told = succeed(&["run", "-n", "8", FOX]);
    for args in [&["run", "-n", "8", "-"][..], &["run", "-n", "8"]] {
        for end in ["", "\n", "\r\n"] {
            let said = with_stdin(args, format!("{FOX}{end}").as_bytes());
            assert_eq!((said.code, &said.out), (0, &told), "{args:?} {end:?}: {said:?}");
        }
    }
    let said = with_stdin(&["run", "-"], b"\xff\xfe");
    assert_error(&said, 1, &["standard input", "UTF-8"]);
}

#[test]
fn sampling_options_and_stop_strings_apply() {
    let whole = fable("The Fox and the Crow");
    let stopped = succeed(&["run", "--stop", "with a", "--stop", "zebra", FOX]);
    assert_eq!(stopped.trim_end(), whole.split("with a").next().unwrap().trim_end());
    // Sampling with a seed is reproducible.
    let dice = ["run", "--temperature", "5", "--seed", "7", "-n", "8", FOX];
    let first = succeed(&dice);
    assert_eq!(first, succeed(&dice));
    assert!(!whole.starts_with(first.trim_end()), "{first}");
    // The model's recommended sampling is greedy, equal to top-k 1.
    let one = succeed(&["run", "--temperature", "5", "--top-k", "1", "-n", "8", FOX]);
    assert!(whole.starts_with(one.trim_end()), "{one}");
    // Both change the prompt, so the memorized answer does not follow.
    for other in [&["--raw"][..], &["--system", "You are a pirate."]] {
        let args = [&["run", "-n", "8"], other, &["Once upon a time"]].concat();
        assert_ne!(succeed(&args), succeed(&["run", "-n", "8", "Once upon a time"]), "{other:?}");
    }
}

#[test]
fn several_words_are_one_prompt() {
    let quoted = succeed(&["run", "-n", "2", FOX]);
    let words: Vec<&str> = FOX.split(' ').collect();
    assert_eq!(succeed(&[&["run", "-n", "2"], &words[..]].concat()), quoted);
    // Options may stand among them.
    assert_eq!(succeed(&[&["run"], &words[..3], &["-n", "2"], &words[3..]].concat()), quoted);
    let folder = temp();
    let path = folder.path().to_str().unwrap();
    for (words, commands) in [
        (
            &["org/Name-4bit", "What", "is this?"][..],
            [
                "`moeflux run --model org/Name-4bit \"What is this?\"`",
                "`moeflux run \"org/Name-4bit What is this?\"`",
            ],
        ),
        (&[path, "Why?"], [&format!("--model {path} \"Why?\"`"), "moeflux run"]),
        (&["Sum", "up", "-"], ["`moeflux run -`", "`moeflux run \"Sum up -\"`"]),
    ] {
        assert_error(&run(&[&["run"], words].concat()), 2, &commands);
    }
}

#[test]
fn prompts_that_cannot_be_answered_are_errors() {
    for args in [&["run", ""][..], &["run", "-"], &["run", "--raw", ""]] {
        assert_error(&run(args), 1, &["the prompt is empty"]);
    }
    let long = "fox ".repeat(400);
    assert_error(&run(&["run", "--ctx", "64", &long]), 1, &["context of 64", "--ctx"]);
    assert_error(&run(&["run", "--ctx", "100000", "x"]), 1, &["2048"]);
    assert_error(
        &run(&["run", "--memory", "1MiB", "x"]),
        1,
        &["budget of 1 MiB", "floor", "--memory"],
    );
}

#[test]
fn a_full_context_ends_the_answer_with_a_note() {
    let said = run(&["run", "--ctx", "40", FOX]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.contains("the context of 40 tokens is full"), "{said:?}");
    assert!(fable("The Fox and the Crow").starts_with(said.out.trim_end()), "{said:?}");
}

#[test]
fn fewer_slots_than_a_token_needs_cause_a_note() {
    let said = run(&["run", "--slots", "8", "-n", "2", FOX]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(
        said.err.contains("note: there are slots for 8 experts, but one token needs 32"),
        "{said:?}"
    );
}

#[test]
fn a_cache_folder_that_cannot_be_written_is_tolerated() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let output =
        moeflux(["run", "-n", "3", FOX]).env("XDG_CACHE_HOME", file.path()).output().unwrap();
    let said = said(output);
    assert_eq!((said.code, said.out.as_str()), (0, "A Crow\n"), "{said:?}");
    assert!(
        said.err.starts_with("note: the built-in model is read from the program itself"),
        "{said:?}"
    );
    assert_eq!(said.err.lines().count(), 2, "{said:?}");
}

/// Starts an answer that takes long enough to be interrupted.
fn slow_answer() -> Child {
    moeflux(["run", "--device", "reference", "--raw", "--ctx", "256", "Once upon a time"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn a_closed_stdout_ends_the_program_quietly() {
    let mut child = slow_answer();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0]).unwrap();
    drop(stdout);
    let said = said(child.wait_with_output().unwrap());
    assert_eq!((said.code, said.err.as_str()), (0, ""));
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_answer_with_its_statistics() {
    let mut child = slow_answer();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0]).unwrap();
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    let said = said(child.wait_with_output().unwrap());
    assert_eq!(said.code, 0, "{said:?}");
    assert!(rest.ends_with('\n'));
    assert!(said.err.contains("interrupted") && said.err.contains("hit rate"), "{said:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_failing_stdout_is_an_error() {
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let output =
        moeflux(["run", "-n", "3", FOX]).stdout(full).stderr(Stdio::piped()).output().unwrap();
    assert_error(&said(output), 1, &["standard output", "No space left"]);
}

#[test]
fn a_conversation_continues_and_is_restored_from_a_file() {
    let folder = temp();
    let file = folder.path().join("talk.json");
    let talk = format!("{FOX}\nWhat then?\n/stats\n/save {}\n", file.display());
    let told = with_stdin(&["chat", "-n", "20"], talk.as_bytes());
    assert_eq!(told.code, 0, "{told:?}");
    let lines: Vec<&str> = told.out.lines().collect();
    assert!(fable("The Fox and the Crow").starts_with(lines[0]), "{told:?}");
    // The second prompt contains the first one and its answer, 45 tokens, which are not computed
    // again.
    let stats = lines.last().unwrap();
    let prefill: u64 = stats.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!((26..60).contains(&prefill), "{stats}");
    assert!(stats.contains("decode 38 tokens"), "{stats}");

    let saved = json(&std::fs::read_to_string(&file).unwrap());
    let roles: Vec<&str> =
        saved.as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
    assert_eq!(saved[1]["content"], lines[0]);

    // Restored from the file, the conversation continues identically.
    let asked = "/load {}\nTell me more.\n".replace("{}", &file.display().to_string());
    let resumed = with_stdin(&["chat", "-n", "8"], asked.as_bytes());
    let straight =
        with_stdin(&["chat", "-n", "20"], format!("{FOX}\nWhat then?\nTell me more.\n").as_bytes());
    assert_eq!(resumed.code, 0, "{resumed:?}");
    assert!(
        straight.out.lines().last().unwrap().starts_with(resumed.out.trim_end()),
        "{resumed:?} {straight:?}"
    );
}

#[test]
fn chat_commands_work() {
    let talk =
        b"/help\n/system\n/system You are a pirate.\n/system\n/system -\n/system\n\n  \n/quit\nnot asked\n";
    let said = with_stdin(&["chat"], talk);
    assert_eq!(said.code, 0, "{said:?}");
    for command in ["/help", "/reset", "/system", "/stats", "/save", "/load", "/quit"] {
        assert!(said.out.contains(command), "{command}: {said:?}");
    }
    assert!(
        said.out.ends_with(
            "there is no system message\nYou are a pirate.\nthere is no system message\n"
        ),
        "{said:?}"
    );
    // After /reset the same question has the same answer.
    let said = with_stdin(&["chat", "-n", "6"], format!("{FOX}\n/reset\n{FOX}\n").as_bytes());
    let lines: Vec<&str> = said.out.lines().collect();
    assert_eq!(lines.len(), 2, "{said:?}");
    assert_eq!(lines[0], lines[1]);
    // A line continued by a backslash.
    let said = with_stdin(&["chat", "-n", "6"], b"Tell me the fable \\\nof The Fox and the Crow.");
    assert_eq!((said.code, said.out.lines().count()), (0, 1), "{said:?}");
}

#[test]
fn errors_in_a_turn_are_printed_and_the_conversation_continues() {
    let long = "fox ".repeat(200);
    let talk = format!("/nonsense\n/load\n/load /no/such/file\n{long}\n{FOX}\n");
    let said = with_stdin(&["chat", "--ctx", "64", "-n", "3"], talk.as_bytes());
    assert_error(
        &said,
        1,
        &["no command /nonsense", "name a file", "/no/such/file", "context of 64", "/reset"],
    );
    assert_eq!(said.err.matches("error: ").count(), 4, "{said:?}");
    assert_eq!(said.out, "A Crow\n", "{said:?}");
}

#[test]
fn an_answer_has_the_form_that_is_asked_for() {
    let folder = temp();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let schema = r#"{"type": "object", "properties": {"animal": {"enum": ["fox", "crow"]}},
        "required": ["animal"], "additionalProperties": false}"#;
    let schema = file("schema.json", schema);
    let animal = json(&succeed(&["run", "--json-schema", &schema, "--seed", "1", FOX]));
    assert!(["fox", "crow"].contains(&animal["animal"].as_str().unwrap()), "{animal}");
    let said = succeed(&["run", "--regex", "[ab]{3}", FOX]);
    assert!(said.trim().len() == 3 && said.trim().bytes().all(|c| b"ab".contains(&c)), "{said}");
    let lark = file("g.lark", "start: \"x\" | \"y\"\n");
    assert!(["x\n", "y\n"].contains(&succeed(&["run", "--lark", &lark, FOX]).as_str()));
    let unique = file("unique.json", r#"{"type": "array", "uniqueItems": true}"#);
    assert_error(&run(&["run", "--json-schema", &unique, FOX]), 1, &["uniqueItems"]);
    let missing = run(&["run", "--json-schema", "no/such/file", FOX]);
    assert_error(&missing, 1, &["no/such/file", "cannot be read"]);
    assert_eq!(run(&["run", "--regex", "a", "--lark", &lark, FOX]).code, 2);
}

#[test]
fn drafts_of_the_built_in_head_change_no_answer() {
    let plain = succeed(&["run", FOX]);
    for draft in ["mtp", "auto", "3"] {
        assert_eq!(succeed(&["run", "--draft", draft, FOX]), plain, "{draft}");
    }
    let answer = json(&succeed(&["run", "--draft", "1", "--json", FOX]));
    let drafts = &answer["statistics"]["drafts"];
    assert!(drafts["drafted"].as_u64() > Some(50), "{drafts}");
    assert!(drafts["accepted"].as_u64() > Some(50), "{drafts}");
    // Under a grammar too.
    let animal = ["run", "--regex", "(fox|crow|hare){4}", "--seed", "3", FOX];
    let drafted = ["run", "--draft", "2", "--regex", "(fox|crow|hare){4}", "--seed", "3", FOX];
    assert_eq!(succeed(&drafted), succeed(&animal));
    assert_error(&run(&["run", "--drafter", "/no/such", FOX]), 1, &["--drafter", "/no/such"]);
    assert_error(&run(&["run", "--draft", "4", FOX]), 2, &["1 to 3"]);
}
