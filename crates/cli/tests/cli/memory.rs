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
