//! Device selection and its messages.

use super::*;

/// Device that `auto` prefers on this machine.
fn preferred() -> String {
    json(&succeed(&["devices", "--json"]))["preferred"].as_str().unwrap().to_owned()
}

/// Whether this machine has a graphics adapter, a software driver among them.
fn has_adapter() -> bool {
    !json(&succeed(&["devices", "--json"]))["adapters"].as_array().unwrap().is_empty()
}

#[test]
fn devices_are_listed() {
    let listed = json(&succeed(&["devices", "--json"]));
    assert!(listed["cpu"]["threads"].as_u64().unwrap() > 0);
    assert!(listed["cpu"]["memory_available"].as_u64().unwrap() > 0);
    let table = succeed(&["devices"]);
    assert!(
        table.starts_with("cpu") && table.contains(listed["cpu"]["isa"].as_str().unwrap()),
        "{table}"
    );
    for (i, adapter) in listed["adapters"].as_array().unwrap().iter().enumerate() {
        assert_eq!(adapter["device"], format!("gpu:{i}"));
        assert!(table.contains(adapter["name"].as_str().unwrap()), "{table}");
    }
    assert!(table.contains(&format!("--device auto takes {}", preferred())), "{table}");
}

#[test]
fn auto_selects_a_device_and_reports_the_reason() {
    let run = |args: &[&str]| {
        let mut command = moeflux([&["run", "-n", "3"], args, &[FOX]].concat());
        said(command.env_remove("MOEFLUX_DEVICE").output().unwrap())
    };
    let told = run(&["--json"]);
    assert_eq!(told.code, 0, "{told:?}");
    let object = json(&told.out);
    let (reason, preferred) = (object["device_choice"].as_str().unwrap(), preferred());
    assert!(told.err.contains(&format!("({reason})")), "{told:?}");
    if preferred == "cpu" {
        assert!(object["device"].as_str().unwrap().starts_with("cpu, "), "{object}");
        assert!(object["statistics"]["dispatches"] == 0, "{object}");
        assert!(object["reader"].as_str().unwrap().ends_with("threads, buffered"), "{object}");
    } else {
        assert!(object["statistics"]["dispatches"].as_u64().unwrap() > 0, "{object}");
    }
    // A GPU driver alone exceeds this budget.
    let small = run(&["--json", "--memory", "100MiB"]);
    assert_eq!(small.code, 0, "{small:?}");
    assert!(json(&small.out)["device"].as_str().unwrap().starts_with("cpu, "), "{small:?}");
}

#[test]
fn a_missing_device_is_an_error() {
    for command in [&["run", "x"][..], &["bench"], &["inspect"]] {
        let said = run(&[command, &["--device", "gpu:4096"]].concat());
        let found = match said.out.as_str() {
            "" => said.err,
            // `inspect` reports a failed plan and succeeds.
            shown => shown.to_owned(),
        };
        assert!(found.contains("there is no adapter gpu:4096"), "{command:?}: {found}");
    }
    assert_error(&run(&["run", "--device", "gpu:4096", "x"]), 1, &["gpu:4096"]);
    if !has_adapter() {
        assert_error(
            &run(&["run", "--device", "gpu", "x"]),
            1,
            &["no usable GPU", "no graphics adapter"],
        );
    }
}

#[test]
fn a_gpu_budget_without_a_gpu_causes_a_note() {
    let said = run(&["run", "--gpu-memory", "1GiB", "-n", "2", FOX]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.contains("note: --gpu-memory has no effect"), "{said:?}");
}

#[test]
fn a_plan_notes_that_it_is_for_the_cpu() {
    let plan = ["plan", "--disk", "1GB/s", "--ram", "20GB/s"];
    for asked in [&["--device", "gpu"][..], &["--gpu-memory", "1GiB"]] {
        let said = run(&[&plan[..], asked].concat());
        if asked[1] == "gpu" && !has_adapter() {
            assert_error(&said, 1, &["no usable GPU"]);
            continue;
        }
        assert!(
            said.code == 0 && said.err.contains("note: this predicts for the processor"),
            "{said:?}"
        );
    }
    assert!(!run(&plan).err.contains("note: "));
}

/// Code compiled by a software driver resides in this process and is part of the plan.
#[test]
fn a_software_driver_stays_within_the_budget() {
    let listed = json(&succeed(&["devices", "--json"]));
    let adapters = listed["adapters"].as_array().unwrap();
    let Some(software) = adapters.iter().find(|a| a["kind"] == "software") else { return };
    let on = ["--device", software["device"].as_str().unwrap()];
    let run = |memory: &str| {
        let ask =
            ["run", "--json", "--ctx", "512", "--chunk", "64", "-n", "2", "--memory", memory, FOX];
        json(&succeed(&[&ask[..], &on].concat()))
    };
    let plan = &run("4GiB")["plan"];
    let of = |name: &str| plan[name].as_u64().unwrap();
    let slots = of("slots") * of("slot");
    let budget = of("process")
        + of("staging")
        + of("dense")
        + of("state")
        + of("scratch")
        + slots
        + (2 << 20);
    let peak = run(&format!("{budget}B"))["statistics"]["peak_memory"].as_u64().unwrap();
    assert!(peak <= budget, "{peak} of {budget}");
}

/// Runs with the Vulkan drivers of a JSON file only; without that file, with no driver.
#[cfg(target_os = "linux")]
fn with_drivers(path: &str, args: &[&str]) -> Said {
    let mut command = moeflux(args);
    command.env("VK_DRIVER_FILES", path).env("VK_ICD_FILENAMES", path);
    said(command.output().unwrap())
}

#[cfg(target_os = "linux")]
#[test]
fn without_a_driver_there_is_no_gpu_and_auto_says_so() {
    let run = |args: &[&str]| with_drivers("/nonexistent/driver.json", args);
    let listed = run(&["devices"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    assert!(listed.out.contains("no graphics adapter"), "{listed:?}");
    assert!(listed.out.contains("--device auto takes cpu"), "{listed:?}");
    for command in [&["run", FOX][..], &["bench"]] {
        let said = run(&[command, &["--device", "gpu"]].concat());
        assert_error(&said, 1, &["no usable GPU", "no graphics adapter", "Vulkan"]);
        assert!(said.out.is_empty(), "{said:?}");
    }
    // The contents of a checkpoint do not depend on a device.
    let said = run(&["inspect", "--device", "gpu"]);
    assert_error(&said, 1, &["no usable GPU"]);
    assert!(said.out.contains("parameters") && said.out.contains("there is none"), "{said:?}");
    assert_error(
        &run(&["run", "--device", "gpu:7", FOX]),
        1,
        &["no adapter gpu:7", "no graphics adapter"],
    );
    let auto = run(&["run", "--device", "auto", "-n", "2", FOX]);
    assert_eq!(auto.code, 0, "{auto:?}");
    assert!(auto.err.contains("on cpu, ") && auto.err.contains("graphics hardware"), "{auto:?}");
}

#[test]
fn unknown_device_names_are_errors_that_list_the_choices() {
    for name in ["gpu:", "gpu:x", "gpu:-1", "cuda", "GPU", ""] {
        let said = run(&["run", "--device", name, FOX]);
        assert!([1, 2].contains(&said.code), "{name:?}: {said:?}");
        assert_error(&said, said.code, &["gpu:N"]);
    }
}

#[test]
fn a_doctor_looks_at_the_machine_and_at_a_model() {
    let findings = |args: &[&str]| -> BTreeMap<String, String> {
        let report: serde_json::Value = serde_json::from_str(&succeed(args)).unwrap();
        let findings = report["findings"].as_array().unwrap().iter().map(|finding| {
            let text = |key: &str| finding[key].as_str().unwrap().to_owned();
            (text("about"), text("found"))
        });
        findings.collect()
    };
    let machine = findings(&["doctor", "--json"]);
    assert!(machine["processor"].contains("thread"), "{machine:?}");
    assert!(machine["memory"].contains("available"), "{machine:?}");
    assert!(machine.contains_key("graphics") && !machine.contains_key("reads"), "{machine:?}");
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tales/model");
    let with_model = findings(&["doctor", "--model", model, "--memory", "256MiB", "--json"]);
    assert!(with_model["reads"].contains("in blocks of"), "{with_model:?}");
    assert!(with_model["speed"].contains("tok/s of decode in"), "{with_model:?}");
    let text = succeed(&["doctor"]);
    assert!(text.contains("processor") && text.lines().last().unwrap().contains("to "), "{text}");
}
