//! Tables fit a terminal of 80 columns.

use super::*;

/// Asserts that no line with columns is wider than 80.
pub(super) fn assert_narrow(out: &str) {
    // Sentences have single spaces.
    let wide = |line: &&str| line.trim().contains("  ") && line.chars().count() > 80;
    let wide: Vec<&str> = out.lines().filter(wide).collect();
    assert!(wide.is_empty(), "{}", wide.join("\n"));
}

#[test]
fn tables_of_models_and_plans_fit_a_terminal() {
    let disk = ["--disk", "1GB/s", "--ram", "20GB/s"];
    for preset in ["kimi-k2", "deepseek-v3.2", "granite-4.0-h-tiny", "nemotron-3-nano"] {
        assert_narrow(&succeed(&["inspect", "--preset", preset, "--memory", "512GiB"]));
        assert_narrow(&succeed(&[&["plan", "--preset", preset][..], &disk].concat()));
    }
    let folder = temp();
    let model = folder.path().join(format!("{}/a model of {}", "x".repeat(90), "y".repeat(90)));
    std::fs::create_dir_all(&model).unwrap();
    for (file, bytes) in moeflux_tales::FILES {
        std::fs::write(model.join(file), bytes).unwrap();
    }
    let shown = succeed(&["inspect", "--model", model.to_str().unwrap()]);
    assert_narrow(&shown);
    assert!(shown.contains("xxx...xxx"), "{shown}");
    assert_narrow(&succeed(&[&["plan"][..], &disk].concat()));
    assert_narrow(&succeed(&["devices"]));
    assert_narrow(&succeed(&["doctor"]));
}
