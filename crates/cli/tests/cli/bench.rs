//! `bench` and `plan`.

use super::*;

#[test]
fn speed_is_measured() {
    let args = ["bench", "--prompt", "8", "--tokens", "4", "--repeat", "2"];
    let measured = json(&succeed(&[&args[..], &["--json"]].concat()));
    assert_eq!(measured["repeats"].as_array().unwrap().len(), 2);
    for phase in ["prefill", "decode"] {
        let speed = |which: &str| measured[phase]["tokens_per_second"][which].as_f64().unwrap();
        assert!(
            0.0 < speed("min")
                && speed("min") <= speed("median")
                && speed("median") <= speed("max")
        );
    }
    assert_eq!(
        (&measured["prefill"]["tokens"], &measured["decode"]["tokens"]),
        (&8.into(), &4.into())
    );
    let table = succeed(&args);
    assert!(
        table.contains("prefill") && table.contains("decode") && table.contains("peak memory"),
        "{table}"
    );
    let only = json(&succeed(&[
        "bench", "--prompt", "0", "--tokens", "2", "--repeat", "1", "--fresh", "--json",
    ]));
    assert!(only["prefill"].is_null() && only["decode"]["tokens"] == 2);
    assert!(only["machine"]["touched"].is_null(), "--fresh leaves memory alone");
    assert_error(&run(&["bench", "--prompt", "0", "--tokens", "0"]), 2, &["nothing to measure"]);
    // The check precedes loading, which would print the reader.
    let beyond = |context, prompt| {
        let said = run(&[
            "bench", "--reader", "threads", "--ctx", context, "--prompt", prompt, "--tokens", "1",
        ]);
        assert!(!said.err.contains("experts are read by"), "{said:?}");
        said
    };
    assert_error(&beyond("100", "1000"), 1, &["1001 tokens", "context of 100", "--ctx 1001"]);
    assert_error(&beyond("100", "1000000000000"), 1, &["1000000000001 tokens", "2048 positions"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_run_that_beats_the_remembered_disk_has_it_measured_anew() {
    let (cache, probes) = (temp(), "moeflux/probes");
    let bench = |more: &[&str]| {
        let args = [&SHORT[..], &["--io", "direct", "--prompt", "64", "--json"], more].concat();
        let said = said(moeflux(args).env("XDG_CACHE_HOME", cache.path()).output().unwrap());
        assert_eq!(said.code, 0, "{said:?}");
        said
    };
    let tight = budget(40);
    let tight = ["--memory", &tight];
    bench(&tight);
    let entry = std::fs::read_dir(cache.path().join(probes)).unwrap().next().unwrap().unwrap();
    let remembered = || json(&std::fs::read_to_string(entry.path()).unwrap());
    let mut slow = remembered();
    if slow["direct"] == false {
        println!("not tested: this file system has no direct reads");
        return;
    }
    for depth in slow["depths"].as_array_mut().unwrap() {
        depth["bytes_per_second"] = 1e5.into();
    }
    std::fs::write(entry.path(), slow.to_string()).unwrap();
    let said = bench(&tight);
    let measured = json(&said.out);
    if said.err.contains("measured anew") {
        assert!(said.err.contains("remembered peak of 100 KB/s"), "{said:?}");
        assert!(remembered()["depths"][0]["bytes_per_second"].as_f64().unwrap() > 1e5);
    }
    // The roof is that of the run's reads.
    let share = measured["decode"]["roof"]["share"].as_f64().unwrap();
    assert!(share < 1.1, "{measured}");
}

/// Arguments of a short run with a small context, whose plan fits few slots.
const SHORT: [&str; 9] =
    ["bench", "--ctx", "256", "--chunk", "64", "--tokens", "4", "--repeat", "1"];

/// Budget that holds `slots` slots.
///
/// The mapped pages of the program are part of a plan and vary between processes: a system that
/// reads the file again may map some MiB more. A slot has 34 KB, so only hundreds of slots absorb
/// them; a run with fewer can be refused as below its floor.
fn budget(slots: u64) -> String {
    // Unpacking the built-in model maps its pages, which the plan of that run would include.
    succeed(&["run", "-n", "1", FOX]);
    budget_of(&["inspect", "--json", "--ctx", "256", "--chunk", "64"], slots)
}

/// Budget that holds `slots` slots beside what the plan of a command has for all else.
fn budget_of(command: &[&str], slots: u64) -> String {
    let plan = json(&succeed(command))["plan"].clone();
    let of = |name: &str| plan[name].as_u64().unwrap();
    let fixed: u64 = ["process", "staging", "dense", "state", "scratch"].into_iter().map(of).sum();
    format!("{}B", fixed + (2 << 20) + slots * of("slot"))
}

fn well_formed(path: &Path) -> String {
    let svg = std::fs::read_to_string(path).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"), "{svg}");
    svg
}

#[test]
fn a_run_is_related_to_the_roofline() {
    let tight = budget(64);
    let measured =
        json(&succeed(&[&SHORT[..], &["--prompt", "8", "--memory", &tight, "--json"]].concat()));
    let disk = &measured["machine"]["disk"];
    assert_eq!(disk["depths"].as_array().unwrap().len(), 4);
    assert!(disk["depths"][0]["bytes_per_second"].as_f64().unwrap() > 0.0);
    assert!(measured["machine"]["memory"]["bytes_per_second"].as_f64().unwrap() > 0.0);
    let decode = &measured["decode"];
    let number = |name: &str| decode[name].as_f64().unwrap();
    let slots =
        measured["plan"]["slots"].as_u64().unwrap() * measured["plan"]["slot"].as_u64().unwrap();
    assert_eq!(
        measured["machine"]["touched"]["bytes"], slots,
        "all slots are empty when it begins"
    );
    // Eight layers of four experts.
    assert_eq!(number("hits_per_token") + number("misses_per_token"), 32.0);
    assert!(number("missed_bytes_per_token") <= number("needed_bytes_per_token"));
    let time = &decode["time"];
    let share = |part: &str| time[part]["share"].as_f64().unwrap();
    let all = share("compute") + share("stalled") + share("other");
    assert!((all - 1.0).abs() < 1e-6, "{time}");
    let roof = &decode["roof"];
    assert!(roof["tokens_per_second"].as_f64().unwrap() > 0.0, "{roof}");
    assert!(
        roof["ideal_tokens_per_second"].as_f64() >= roof["tokens_per_second"].as_f64(),
        "{roof}"
    );
    let token = &decode["token_ms"];
    assert!(
        token["median"].as_f64() <= token["p99"].as_f64()
            && token["p99"].as_f64() <= token["max"].as_f64()
    );
    let layers = measured["layers"].as_array().unwrap();
    let needed: u64 = layers.iter().map(|l| l["needed"].as_u64().unwrap()).sum();
    let of_repeats =
        |phase: &str| measured["repeats"][0][phase]["stats"]["experts_needed"].as_u64().unwrap();
    assert_eq!(needed, of_repeats("prefill") + of_repeats("decode"));
    assert!(measured["prefill"]["roof"].is_null());
}

#[test]
fn contexts_are_measured_one_after_another() {
    let folder = temp();
    let plot = folder.path().join("context.svg");
    let args = [&SHORT[..], &["--context", "0,16,40"]].concat();
    let measured =
        json(&succeed(&[&args[..], &["--json", "--plot", plot.to_str().unwrap()]].concat()));
    let contexts = measured["contexts"].as_array().unwrap();
    let lengths: Vec<u64> = contexts.iter().map(|c| c["context"].as_u64().unwrap()).collect();
    assert_eq!(lengths, [0, 16, 40]);
    assert!(contexts[0]["prefill"].is_null() && contexts[2]["prefill"]["tokens"] == 40);
    assert!(contexts.iter().all(|c| c["decode"]["tokens"] == 4));
    assert!(well_formed(&plot).contains("tokens of the prompt"));

    let csv = succeed(&[&args[..], &["--csv"]].concat());
    let lines: Vec<Vec<&str>> = csv.lines().map(|l| l.split(',').collect()).collect();
    assert!(lines.len() == 6 && lines.iter().all(|l| l.len() == lines[0].len()), "{csv}");
    assert_eq!(&lines[0][..4], ["budget", "slots", "phase", "context"]);
    assert_eq!(lines[1..].iter().filter(|l| l[2] == "decode").count(), 3);

    let table = succeed(&args);
    assert!(table.contains("decode after 40") && table.contains("prefill 16"), "{table}");
    tables::assert_narrow(&table);
    let nothing = [&SHORT[..], &["--tokens", "0", "--context", "0,8"]].concat();
    assert_eq!(run(&nothing).code, 2);
}

#[test]
fn sessions_decode_together() {
    let args = [&SHORT[..], &["--prompt", "12", "--sessions", "1,2,5"]].concat();
    // The same command maps the same pages, and half of the slots leave room both ways.
    let tight = budget_of(&[&args[..], &["--json"]].concat(), 128);
    let args = [&args[..], &["--memory", &tight]].concat();
    let measured = json(&succeed(&[&args[..], &["--json"]].concat()));
    let contexts = measured["contexts"].as_array().unwrap();
    assert_eq!(contexts.len(), 3);
    let number = |at: &serde_json::Value, path: &str| at.pointer(path).unwrap().as_f64().unwrap();
    for (at, n) in contexts.iter().zip([1.0, 2.0, 5.0]) {
        assert_eq!(number(at, "/together/sessions"), n);
        assert_eq!(number(at, "/decode/tokens"), 4.0 * n, "a token of each in each of four steps");
        let (step, speed) =
            (number(at, "/decode/token_ms/median"), number(at, "/decode/tokens_per_second/median"));
        assert!(step > 0.0 && speed > 0.0);
        assert_eq!(number(at, "/prefill/tokens"), 12.0 * n, "all prompts");
        // Eight layers, four experts per token; experts that several sessions choose count once.
        let experts = number(at, "/together/experts_per_layer");
        assert!(if n > 1.0 { 4.0 < experts && experts < 4.0 * n } else { experts == 4.0 }, "{at}");
        assert!(
            number(at, "/decode/missed_bytes_per_token")
                <= number(at, "/decode/needed_bytes_per_token")
        );
        let roof = number(at, "/together/against_one/roof_tokens_per_second");
        let share = number(at, "/together/against_one/roof_share");
        assert!((share * roof / speed - 1.0).abs() < 1e-6, "{at}");
        let reached =
            number(at, "/decode/roof/share") * number(at, "/decode/roof/tokens_per_second");
        assert!((reached / speed - 1.0).abs() < 1e-6, "{at}");
    }
    // Dense weights are shared among the sessions' tokens.
    let floor = |i: usize| number(&contexts[i], "/decode/roof/compute_ms");
    assert!(floor(2) < floor(1) && floor(1) < floor(0), "{measured}");
    let bytes = |i: usize| number(&contexts[i], "/together/bytes_per_step");
    let experts = |i: usize| number(&contexts[i], "/together/experts_per_layer");
    let of_expert = (bytes(2) - bytes(0)) / (experts(2) - experts(0));
    assert!(
        (bytes(1) - bytes(0) - of_expert * (experts(1) - experts(0))).abs() < 1.0,
        "{measured}"
    );
    assert_eq!(number(&contexts[0], "/together/against_one/times"), 1.0);
    assert_eq!(measured["plan"]["sessions"], 5);
    assert!(measured["plan"]["slots"].as_u64() < Some(256), "{measured}");
    assert!(
        measured["repeats"][2]["sessions"] == 5
            && measured["peak_memory"].as_u64() <= measured["plan"]["budget"].as_u64()
    );

    let table = succeed(&args);
    assert!(table.contains("decode of 5") && table.contains("experts a layer"), "{table}");
    tables::assert_narrow(&table);
    let csv = succeed(&[&args[..], &["--csv"]].concat());
    let lines: Vec<Vec<&str>> = csv.lines().map(|l| l.split(',').collect()).collect();
    let column = lines[0].iter().position(|name| *name == "sessions").unwrap();
    assert_eq!(
        lines[1..].iter().map(|l| l[column]).collect::<Vec<_>>(),
        ["1", "1", "2", "2", "5", "5"],
        "{csv}"
    );

    let wrong = |more: &[&str]| run(&[&["bench", "--sessions", "1,2"], more].concat());
    assert_error(&wrong(&["--tokens", "0"]), 2, &["--sessions", "--tokens 0"]);
    assert_error(&wrong(&["--plot", "x.svg"]), 2, &["cannot be used with"]);
    assert_error(&run(&["bench", "--sessions", "0"]), 2, &["--sessions"]);
    let many = run(&[&SHORT[..], &["--quiet", "--sessions", "65"]].concat());
    assert_error(&many, 1, &["65 sessions", "--chunk 65"]);
}

#[test]
fn batched_decode_in_budgets_is_compared_with_a_saved_run() {
    let folder = temp();
    let saved = folder.path().join("before.json").to_str().unwrap().to_owned();
    let budgets = format!("{},{}", budget(200), budget(256));
    let args =
        [&SHORT[..], &["--prompt", "8", "--sessions", "1,3", "--budgets", &budgets]].concat();
    let said = run(&[&args[..], &["--save", &saved]].concat());
    assert!(said.code == 0 && said.out.matches("decode of 3").count() == 4, "{said:?}");
    let mut before = json(&std::fs::read_to_string(&saved).unwrap());
    before["budgets"][1]["contexts"][1]["decode"]["tokens_per_second"]["median"] = 1e9.into();
    std::fs::write(&saved, before.to_string()).unwrap();
    let said = run(&[&args[..], &["--compare", &saved, "--tolerance", "99%"]].concat());
    let slower: Vec<&str> = said.out.lines().filter(|l| l.trim_end().ends_with("slower")).collect();
    assert!(
        said.code == 1 && slower.len() == 1 && slower[0].starts_with("decode of 3"),
        "{said:?}"
    );
    tables::assert_narrow(&said.out);
}

#[test]
fn budgets_are_measured_in_separate_processes_and_compared_with_a_saved_run() {
    let folder = temp();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (small, large, saved, plot) =
        (budget(128), budget(256), path("before.json"), path("budgets.svg"));
    let budgets = format!("{small},{large}");
    let args = [&SHORT[..], &["--prompt", "8", "--budgets", &budgets]].concat();
    let said = run(&[&args[..], &["--save", &saved, "--plot", &plot]].concat());
    assert_eq!(said.code, 0, "{said:?}");
    // A line for each budget in both tables.
    assert_eq!(said.out.lines().filter(|l| l.starts_with("decode ")).count(), 4, "{said:?}");
    assert!(well_formed(Path::new(&plot)).contains("memory budget in GiB"));

    let before = json(&std::fs::read_to_string(&saved).unwrap());
    let runs = before["budgets"].as_array().unwrap();
    let slots: Vec<u64> = runs.iter().map(|r| r["plan"]["slots"].as_u64().unwrap()).collect();
    assert!(slots.len() == 2 && slots[0] < slots[1], "{slots:?}");
    // Each run stayed within its budget.
    assert!(
        runs.iter().all(|r| r["peak_memory"].as_u64() <= r["plan"]["budget"].as_u64()),
        "{before}"
    );

    let mut faster = before.clone();
    for run in faster["budgets"].as_array_mut().unwrap() {
        run["contexts"][0]["decode"]["tokens_per_second"]["median"] = 1e9.into();
    }
    std::fs::write(&saved, faster.to_string()).unwrap();
    let said = run(&[&args[..], &["--compare", &saved]].concat());
    assert!(said.code == 1 && said.out.contains("slower"), "{said:?}");
    let said = run(&[&args[..], &["--compare", &saved, "--tolerance", "100%"]].concat());
    assert_eq!(said.code, 0, "{said:?}");

    assert_error(&run(&["bench", "--compare", "/no/such.json"]), 1, &["/no/such.json"]);
    std::fs::write(&saved, "{}").unwrap();
    assert_error(&run(&["bench", "--compare", &saved]), 1, &[&saved, "bench --save"]);
    // Results of successful runs are shown and saved.
    let some = format!("{small},1MiB");
    let said =
        run(&[&SHORT[..], &["--prompt", "8", "--save", &saved, "--budgets", &some]].concat());
    assert!(said.code == 1 && said.err.contains("the run in 1 MiB failed"), "{said:?}");
    assert_eq!(said.out.lines().filter(|l| l.starts_with("decode ")).count(), 2, "{said:?}");
    let kept = json(&std::fs::read_to_string(&saved).unwrap());
    assert_eq!(kept["budgets"].as_array().map(Vec::len), Some(1), "{kept}");
    let said = run(&[&SHORT[..], &["--budgets", "1MiB"]].concat());
    assert_error(
        &Said { err: said.err.lines().skip(1).collect(), ..said },
        1,
        &["floor", "the run in 1 MiB failed"],
    );
    assert_error(
        &run(&["bench", "--budgets", "1GiB", "--trace", "x"]),
        2,
        &["cannot be used with"],
    );
    assert_error(&run(&["bench", "--compare", "x", "--tolerance", "lots"]), 2, &["10%"]);
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_the_budgets_already_measured() {
    use std::{io::BufRead, os::unix::process::CommandExt};

    let budgets = format!("{},{}", budget(128), budget(256));
    let mut program = moeflux([&SHORT[..], &["--prompt", "8", "--budgets", &budgets]].concat());
    let mut child =
        program.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let said_aside = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut begun =
        said_aside.lines().map_while(Result::ok).filter(|l| l.starts_with("measuring in"));
    assert!(begun.nth(1).is_some(), "the second budget has begun");
    let kill =
        Command::new("kill").args(["-INT", "--", &format!("-{}", child.id())]).status().unwrap();
    assert!(kill.success());
    let said = said(child.wait_with_output().unwrap());
    assert!(said.code == 130 && said.out.contains("\ndecode "), "{said:?}");
}

#[test]
fn files_are_written_even_if_stdout_is_closed() {
    let folder = temp();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (saved, plot) = (path("saved.json"), path("plot.svg"));
    let args =
        [&SHORT[..], &["--prompt", "8", "--json", "--save", &saved, "--plot", &plot]].concat();
    let mut child = moeflux(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    drop(child.stdout.take());
    let said = said(child.wait_with_output().unwrap());
    assert_eq!(said.code, 0, "{said:?}");
    json(&std::fs::read_to_string(&saved).unwrap());
    well_formed(Path::new(&plot));
}

#[test]
fn a_page_cache_that_cannot_be_dropped_causes_a_note() {
    let said = run(&[&SHORT[..], &["--prompt", "8", "--cold", "--json"]].concat());
    assert_eq!(said.code, 0, "{said:?}");
    let cold = json(&said.out)["machine"]["cold"].as_bool().unwrap();
    assert_ne!(cold, said.err.contains("reads may come from the page cache"), "{said:?}");
}

#[test]
fn budgets_are_planned_from_the_floor_to_everything() {
    let folder = temp();
    let plot = folder.path().join("plan.svg");
    let args = ["plan", "--disk", "1GB/s", "--ram", "20GB/s", "--context", "64"];
    let plan = json(&succeed(&[&args[..], &["--json", "--plot", plot.to_str().unwrap()]].concat()));
    let rows = plan["budgets"].as_array().unwrap();
    let column = |name: &str| rows.iter().map(|r| r[name].as_f64().unwrap()).collect::<Vec<_>>();
    assert!(rows.len() > 2, "{plan}");
    for name in ["budget", "slots", "hit_rate", "tokens_per_second"] {
        assert!(column(name).is_sorted(), "{name}: {plan}");
    }
    let last = rows.last().unwrap();
    assert_eq!(
        (&last["slots"], &last["hit_rate"], &last["bound_by"]),
        (&256.into(), &1.0.into(), &"memory".into())
    );
    assert_eq!(
        (&rows[0]["bound_by"], &plan["hit_rates"]),
        (&"disk".into(), &"uniform routing".into())
    );
    assert_eq!((&plan["floor"], &plan["everything"]), (&rows[0]["budget"], &last["budget"]));
    assert!(well_formed(&plot).contains("perfect lookahead"));
    let shown = succeed(&args);
    assert!(
        shown.contains("disk 1.00 GB/s; memory 20.0 GB/s") && shown.contains("worth having: "),
        "{shown}"
    );
    let two = json(&succeed(&[&args[..], &["--json", "--budgets", "1GiB,2GiB"]].concat()));
    let two = two["budgets"].as_array().unwrap();
    assert_eq!(two.len(), 2);
    // A server's prefix cache has what is left, and a part where experts lack slots.
    let of_server = |row: &serde_json::Value| row["serving"]["prefix_memory"].as_u64().unwrap();
    assert!(two.iter().all(|row| row["serving"]["division"].is_null()), "{two:?}");
    assert!(of_server(&two[0]) > 512 << 20 && of_server(&two[1]) > 1536 << 20, "{two:?}");
    // Where the server and its grammars leave room for some of the experts.
    let budgets: Vec<String> = (200..260).step_by(4).map(|mib| format!("{mib}MiB")).collect();
    let rows = json(&succeed(&[&args[..], &["--json", "--budgets", &budgets.join(",")]].concat()));
    let rows = rows["budgets"].as_array().unwrap();
    let divided = rows.iter().find(|row| row["serving"]["division"].is_object()).unwrap();
    let division = &divided["serving"]["division"];
    assert!(division["slot_seconds_per_gib"].as_f64() > Some(0.0), "{divided}");
    assert!(
        of_server(divided) > 0 && divided["serving"]["slots"].as_u64() < Some(256),
        "{divided}"
    );
    let shown = succeed(&[&args[..], &["--budgets", &budgets.join(",")]].concat());
    assert!(shown.contains("a GiB of slots") && shown.contains("prefix cache"), "{shown}");
    tables::assert_narrow(&shown);
    assert_error(&run(&[&args[..], &["--budgets", "1MiB"]].concat()), 1, &["floor"]);
    let beyond = run(&[&args[..5], &["--context", "2048"]].concat());
    assert_error(&beyond, 1, &["2048", "the model has 2048 positions", "--context"]);
}

#[test]
fn a_plan_uses_a_trace_and_a_saved_benchmark() {
    let folder = temp();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (trace, saved) = (path("fox.trace"), path("saved.json"));
    succeed(&["run", "--trace", &trace, FOX]);
    succeed(&[&SHORT[..], &["--prompt", "0", "--save", &saved]].concat());
    // The disk's speed is remembered from the benchmark.
    let args = ["plan", "--trace", &trace, "--measured", &saved, "--json"];
    let plan = json(&succeed(&args));
    assert_eq!(plan["hit_rates"], "trace");
    let share = plan["computing_share"].as_f64().unwrap();
    assert!(0.0 < share && share < 1.5, "{plan}");
    assert!(plan["disk"]["depths"].as_array().is_some(), "{plan}");
    let preset = ["plan", "--preset", "qwen3-30b-a3b"];
    assert_error(
        &run(&[&preset[..], &["--trace", &trace]].concat()),
        1,
        &["others than this model's"],
    );
}

#[test]
fn a_preset_is_planned_with_a_known_disk() {
    let args = ["plan", "--preset", "qwen3-30b-a3b", "--ram", "30GB/s", "--ctx", "1024"];
    let nowhere = temp();
    let unknown = moeflux(args).env("XDG_CACHE_HOME", nowhere.path()).output().unwrap();
    assert_error(&said(unknown), 2, &["speed of the disk", "--disk 3.5GB/s"]);
    let shown = succeed(&[&args[..], &["--disk", "1.2GB/s"]].concat());
    let words = ["8 GiB", "doubling", "gives"];
    assert!(words.iter().all(|word| shown.contains(word)), "{shown}");
    // A measurement of any disk will do.
    succeed(&["plan", "--ram", "30GB/s"]);
    let remembered = json(&succeed(&[&args[..], &["--json"]].concat()));
    assert!(remembered["disk"]["block"].as_u64().unwrap() > 0, "{remembered}");
}
