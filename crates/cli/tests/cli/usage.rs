//! Help, versions, completions, wrong use.

use super::*;

/// Commands listed by `--help`.
fn commands(help: &str) -> Vec<&str> {
    let listed =
        help.lines().skip_while(|l| *l != "Commands:").skip(1).take_while(|l| !l.is_empty());
    let names = listed.filter_map(|l| l.strip_prefix("  ")?.split_whitespace().next());
    names.filter(|name| *name != "help").collect()
}

#[test]
fn help_shows_every_command_with_examples() {
    let help = succeed(&["--help"]);
    let page = include_str!("../../../../docs/guide/commands.md");
    let commands = commands(&help);
    assert!(commands.len() > 10, "{commands:?}");
    for command in commands {
        assert!(
            page.contains(&format!("\n| `{command}")),
            "{command} is not in docs/guide/commands.md"
        );
        let of_command = succeed(&[command, "--help"]);
        assert!(of_command.contains(&format!("  moeflux {command} ")), "{command} has no example");
        assert!(
            of_command.lines().all(|l| l.chars().count() <= 100),
            "{command}: a line is too long"
        );
    }
    let chunks = format!(
        "[default: {}, or {} on a discrete GPU",
        moeflux::runtime::DEFAULT_CHUNK,
        moeflux::runtime::CARD_CHUNK
    );
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&succeed(&["run", "--help"])).contains(&chunks));
    let help = succeed(&["synth", "--help"]);
    for preset in moeflux::tools::synth::presets() {
        assert!(help.contains(&format!("  {} ", preset.name)), "{}", preset.name);
    }
    assert_eq!(succeed(&["--version"]), format!("moeflux {}\n", env!("CARGO_PKG_VERSION")));
}

#[test]
fn wrong_use_is_exit_code_2_and_names_the_choices() {
    let wrong: [(&[&str], &str); 32] = [
        (&["nonsense"], "unrecognized subcommand"),
        (&["run", "--nonsense", "x"], "unexpected argument"),
        (&["run", "--memory", "lots", "x"], "8GiB"),
        (&["run", "--ctx", "0", "x"], "--ctx"),
        (&["run", "--temperature", "-1", "x"], "0 or more"),
        (&["run", "--top-p", "0", "x"], "above 0"),
        (&["run", "--min-p", "1.5", "x"], "from 0 to 1"),
        (&["run", "--presence-penalty", "3", "x"], "from -2 to 2"),
        (&["run", "--stop", "", "x"], "--stop"),
        (&["run", "--device", "abacus", "x"], "auto, cpu, gpu"),
        (&["run", "--device", "gpu:one", "x"], "gpu:N"),
        (&["run", "--gpu-memory", "lots", "x"], "8GiB"),
        (&["run", "--gpu-memory", "8GiB,lots", "x"], "8GiB"),
        (&["run", "--device", "gpu:0,cpu", "x"], "gpu:0,gpu:1"),
        (&["run", "--device", "gpu,gpu:1", "x"], "gpu:0,gpu:1"),
        (&["run", "--raw", "--system", "x", "y"], "cannot be used with"),
        (&["run", "--prefix-cache-size", "1GiB", "x"], "--prefix-cache"),
        (&["chat", "--kv", "f64"], "possible values: f32, f16, q8"),
        (&["logits", "--tokens", "x.json"], "--out"),
        (&["bench", "kernels"], "unexpected argument"),
        (&["synth", "gpt-5", "--out", "x"], "qwen3-30b-a3b"),
        (&["completions", "ksh"], "bash"),
        (&["serve", "--host", "0.0.0.0"], "--no-key"),
        (&["serve", "--allow-origin", "app.example"], "https://app.example"),
        (&["serve", "--allow-origin", "https://app.example/"], "write https://app.example"),
        (&["serve", "--allow-origin", "https://app.example:99999"], "from 1 to 65535"),
        (&["serve", "--allow-origin", "null"], "--api-key-file"),
        (&["serve", "--allow-origin", "*"], "--api-key-file"),
        (&["serve", "--allow-host", "box.lan:80"], "write box.lan"),
        (&["serve", "--allow-host", ""], "such as box.lan"),
        (&["serve", "--image-urls", "a.example,*.b"], "such as images.example.com"),
        (&["run", "--mirror", "x", "x"], "the built-in model has no mirrors"),
    ];
    for (args, part) in wrong {
        assert_error(&run(args), 2, &[part]);
    }
    let none = run(&[]);
    assert_eq!((none.code, none.err.lines().count()), (2, 5), "{none:?}");
    for line in none.err.lines() {
        assert!(line.starts_with("moeflux ") && line.len() < 100, "{line}");
    }
}

#[test]
fn tokens_are_printed_without_loading_the_model() {
    let list = succeed(&["tokenize", "The Fox"]);
    let ids: Vec<u32> = serde_json::from_str(&succeed(&["tokenize", "--ids", "The Fox"])).unwrap();
    assert_eq!(list.lines().count(), ids.len());
    let mut text = String::new();
    for (line, id) in list.lines().zip(&ids) {
        let (printed, piece) = line.split_once('\t').unwrap();
        assert_eq!(printed.trim(), id.to_string());
        text += &serde_json::from_str::<String>(piece).unwrap();
    }
    assert!(text.ends_with("The Fox"), "{text}");
    let fed = with_stdin(&["tokenize", "--ids", "-"], b"The Fox");
    assert_eq!(serde_json::from_str::<Vec<u32>>(&fed.out).unwrap(), ids);
    let plain = succeed(&["tokenize", "--plain", "--ids", "The Fox"]);
    let plain: Vec<u32> = serde_json::from_str(&plain).unwrap();
    assert!(ids.ends_with(&plain) && !plain.is_empty());
}

#[test]
fn completions_are_printed_for_every_shell() {
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = succeed(&["completions", shell]);
        assert!(script.contains("moeflux") && script.contains("perplexity"), "{shell}");
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("man1");
    succeed(&["man", dir.to_str().unwrap()]);
    let page = |name: &str| std::fs::read_to_string(dir.join(name)).unwrap();
    assert!(page("moeflux.1").contains("moeflux\\-run(1)"));
    for command in commands(&succeed(&["--help"])) {
        let page = page(&format!("moeflux-{command}.1"));
        assert!(page.contains(".SH SYNOPSIS") && page.contains(env!("CARGO_PKG_VERSION")));
    }
    assert!(!dir.join("moeflux-help.1").exists());
    let file = dir.join("moeflux.1");
    assert_error(&run(&["man", file.to_str().unwrap()]), 1, &["cannot write manual pages"]);
}

#[test]
fn synth_alone_lists_its_presets() {
    let listed = succeed(&["synth"]);
    tables::assert_narrow(&listed);
    for preset in moeflux::tools::synth::presets() {
        let row = listed.lines().find(|line| line.starts_with(&format!("{} ", preset.name)));
        assert!(row.is_some_and(|row| row.ends_with(" GB")), "{}: {listed}", preset.name);
    }
    assert!(listed.contains("`moeflux synth PRESET --out DIR`"), "{listed}");
    for (args, part) in [
        (&["synth", "qwen3-30b-a3b"][..], "--out"),
        (&["synth", "--out", "x"], "PRESET"),
        (&["synth", "--layers", "4"], "--out"),
        (&["synth", "qwen3-30b-a3b", "--config", "c", "--out", "x"], "cannot be used with"),
    ] {
        assert_error(&run(args), 2, &[part]);
    }
}

#[test]
fn renamed_flags_are_accepted_under_their_old_names() {
    assert_error(&run(&["run", "--session-keys", "q8", FOX]), 2, &["--session <FILE>"]);
    assert_error(&run(&["run", "--look-ahead", "maybe", FOX]), 2, &["--prefetch"]);
    assert!(!succeed(&["run", "--help"]).contains("look-ahead"));
}

#[test]
fn defaults_of_options_are_read_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("moeflux.toml");
    let run = |file: &str, args: &[&str]| {
        std::fs::write(&path, file).unwrap();
        said(moeflux(args).env("MOEFLUX_CONFIG", &path).output().unwrap())
    };
    let fable = ["run", FOX];
    let four = run("quiet = true\n[run]\nmax-tokens = 4", &fable);
    assert_eq!(four.code, 0, "{four:?}");
    assert_eq!(four.out, succeed(&["run", "--max-tokens", "4", FOX]));
    assert!(four.err.is_empty(), "{four:?}");
    let six = run("max-tokens = 4", &["run", "--max-tokens", "6", FOX]);
    assert_eq!(six.out, succeed(&["run", "--max-tokens", "6", FOX]));
    for (file, words) in [
        ("max-token = 4", "no option --max-token"),
        ("max-tokens = \"few\"", "few"),
        ("max-tokens", "moeflux.toml"),
    ] {
        let wrong = run(file, &fable);
        assert_eq!(wrong.code, 2, "{wrong:?}");
        let place = path.display().to_string();
        assert!(wrong.err.contains(words) && wrong.err.contains(&place), "{}", wrong.err);
    }
    let missing = folder.path().join("missing.toml");
    let said = said(moeflux(fable).env("MOEFLUX_CONFIG", &missing).output().unwrap());
    assert!(said.code == 2 && said.err.contains("missing.toml"), "{said:?}");
}
