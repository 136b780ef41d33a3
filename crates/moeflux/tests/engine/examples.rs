//! Runs the programs in `examples/` on the embedded model and checks their output.
//!
//! Cargo builds them with all tests of the package, but not for a single `--test` target.

use std::{
    env::{consts::EXE_SUFFIX, current_exe},
    io::Write,
    process::{Command, Stdio},
};

const CROW: &str = "A Crow was sitting on a branch of a tree with a piece of cheese in her beak when a Fox observed her";

/// Stdout and stderr of an example with `input` as stdin.
fn run(name: &str, input: &str) -> (String, String) {
    // Test binaries are in `deps`, next to `examples`.
    let test = current_exe().unwrap();
    let path =
        test.parent().unwrap().with_file_name("examples").join(format!("{name}{EXE_SUFFIX}"));
    let mut command = Command::new(&path);
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap_or_else(|e| {
        panic!("{}: {e}; `cargo build -p moeflux --examples` makes it", path.display());
    });
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let [stdout, stderr] = [out.stdout, out.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(out.status.success(), "{name}: {stdout}{stderr}");
    (stdout, stderr)
}

#[test]
fn hello_tells_the_fable() {
    let (answer, costs) = run("hello", "");
    assert!(answer.starts_with(CROW), "{answer}");
    assert!(answer.ends_with("what you want is wits.\"\n"), "{answer}");
    assert!(costs.contains(" tokens, "), "{costs}");
}

#[test]
fn chat_computes_no_message_twice() {
    let (answers, reuse) = run(
        "chat",
        "Tell me the fable of The Fox and the Crow.\nTell me the fable of The Crow and the Pitcher.\n",
    );
    assert!(answers.starts_with(CROW), "{answers}");
    assert_eq!(answers.lines().count(), 2, "{answers}");
    // The second prompt reuses the first one and its response, except the end token.
    let numbers: Vec<usize> = reuse
        .split(|c: char| !c.is_ascii_digit())
        .filter(|number| !number.is_empty())
        .map(|number| number.parse().unwrap())
        .collect();
    let [tokens, prompt, none, _, _, reused] = numbers[..] else { panic!("{reuse}") };
    assert_eq!((none, reused), (0, prompt + tokens - 1), "{reuse}");
}

#[test]
fn similar_sentences_have_similar_embeddings() {
    let (table, _) = run("hidden_states", "");
    let rows: Vec<Vec<f64>> = table
        .lines()
        .map(|line| line.split_whitespace().map_while(|number| number.parse().ok()).collect())
        .collect();
    assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [4; 4], "{table}");
    for (i, row) in rows.iter().enumerate() {
        assert_eq!(row[i], 1.0, "{table}");
        assert!(
            row.iter().zip(&rows).all(|(x, other)| *x == other[i] && x.abs() <= 1.0),
            "{table}"
        );
    }
    assert!(rows[0][1] > rows[0][2] && rows[0][1] > rows[0][3], "{table}");
    assert!(rows[2][3] > rows[2][0] && rows[2][3] > rows[2][1], "{table}");
}

#[test]
fn many_sessions_share_their_prefix() {
    let (out, _) = run("many_sessions", "");
    let reused: Vec<&str> = out.lines().filter(|line| line.ends_with(" tokens reused")).collect();
    assert_eq!(reused.len(), 4, "{out}");
    assert!(reused.iter().all(|line| line.contains(": 45 of ")), "{out}");
    assert!(out.contains(&format!("The Fox and the Crow: {CROW}")), "{out}");
    assert!(out.lines().last().unwrap().contains("bytes read per token"), "{out}");
}

#[test]
fn the_first_words_start_with_the_given_letters() {
    let (texts, _) = run("custom_sampler", "");
    let firsts: Vec<char> = texts
        .lines()
        .map(|line| {
            line.strip_prefix("Once upon a time there was a ").unwrap().chars().next().unwrap()
        })
        .collect();
    assert_eq!(firsts, ['f', 'l', 'p'], "{texts}");
}
