//! `logits`: differential testing.

use std::collections::HashMap;

use safetensors::{Dtype, SafeTensors, tensor::TensorView};

use super::*;

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(temp());
        std::fs::write(
            folder.0.path().join("ids.json"),
            "[1, 500, 32, 460, 758, 4000, 7, 7, 99, 1234]\n",
        )
        .unwrap();
        folder
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn logits(&self, more: &[&str]) -> Said {
        run(&[&["logits", "--tokens", &self.path("ids.json")], more].concat())
    }

    fn files(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.0.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

#[test]
fn the_file_holds_logits_and_the_trace() {
    let folder = Folder::new();
    let said = folder.logits(&[
        "--out",
        &folder.path("a.safetensors"),
        "--trace",
        "--prefill",
        "7",
        "--chunk",
        "3",
    ]);
    assert_eq!(said.code, 0, "{said:?}");
    assert_eq!(folder.files(), ["a.safetensors", "ids.json"]);
    let bytes = std::fs::read(folder.path("a.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.len(), 1 + 8 + 8);
    let logits = file.tensor("logits").unwrap();
    assert_eq!((logits.dtype(), logits.shape()), (Dtype::F32, &[10, 4096][..]));
    for layer in 0..8 {
        let hidden = file.tensor(&format!("hidden.{layer}")).unwrap();
        assert_eq!((hidden.dtype(), hidden.shape()), (Dtype::F32, &[10, 256][..]));
        assert!(
            hidden.data().chunks(256 * 4).all(|row| row.iter().any(|b| *b != 0)),
            "an empty row in {layer}"
        );
        let experts = file.tensor(&format!("experts.{layer}")).unwrap();
        assert_eq!((experts.dtype(), experts.shape()), (Dtype::I32, &[10, 4][..]));
        for row in experts.data().chunks(16) {
            let mut ids: Vec<&[u8]> = row.chunks(4).collect();
            ids.sort_unstable();
            ids.dedup();
            assert_eq!(ids.len(), 4, "experts of layer {layer}");
        }
    }
}

#[test]
fn logits_are_independent_of_slots_and_threads_and_if_exact_of_chunks() {
    let folder = Folder::new();
    let a = folder.path("a.safetensors");
    assert_eq!(folder.logits(&["--out", &a, "--trace", "--exact"]).code, 0);
    for change in [
        &["--slots", "4"][..],
        &["--threads", "1"],
        &["--chunk", "1"],
        &["--prefill", "0"],
        &["--prefill", "6"],
    ] {
        let said = folder.logits(&[change, &["--exact", "--trace", "--compare", &a]].concat());
        assert_eq!(said.code, 0, "{change:?} {said:?}");
        assert!(
            said.out.ends_with("no difference: 17 tensors, bit for bit\n"),
            "{change:?} {said:?}"
        );
    }
    // Equal values give equal bytes.
    let b = folder.path("b.safetensors");
    assert_eq!(folder.logits(&["--out", &b, "--trace", "--exact", "--slots", "9"]).code, 0);
    assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap());
}

#[test]
fn the_first_layer_and_row_that_differ_are_found() {
    let folder = Folder::new();
    let (a, b) = (folder.path("a.safetensors"), folder.path("b.safetensors"));
    assert_eq!(folder.logits(&["--out", &a, "--trace"]).code, 0);
    std::fs::write(folder.path("ids.json"), "[1, 500, 32, 460, 759, 4000, 7, 7, 99, 1234]")
        .unwrap();
    let said = folder.logits(&["--out", &b, "--trace", "--compare", &a]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(
        said.out.lines().last().unwrap().starts_with("first difference: layer 0, "),
        "{said:?}"
    );
    assert!(said.out.contains(", row 4: "), "{said:?}");
    tables::assert_narrow(&said.out);
    assert!(said.out.contains("logits: mean KL"), "{said:?}");
    // Two files, without a model.
    let again = run(&["logits", "--out", &b, "--compare", &a, "--model", "/no/such/model"]);
    assert_eq!((again.code, &again.out), (1, &said.out), "{again:?}");
    let same = run(&["logits", "--out", &a, "--compare", &a]);
    assert!(same.code == 0 && same.out.contains("bit for bit"), "{same:?}");
    // The files have only logits in common.
    assert_eq!(folder.logits(&["--out", &a]).code, 0);
    assert!(
        run(&["logits", "--out", &a, "--compare", &b])
            .out
            .contains("no difference: 1 tensor, bit for bit")
    );
    // Fewer rows.
    std::fs::write(folder.path("ids.json"), "[1, 500]").unwrap();
    assert_error(&folder.logits(&["--compare", &a]), 1, &["2 x 4096", "10 x 4096", "same tokens"]);
}

/// Logits file of another engine: values computed by mlx-lm, as f32 or rounded to bf16.
fn golden(name: &str, half: bool) -> (Vec<u8>, Vec<u8>) {
    let bytes = std::fs::read(moeflux_goldens::golden(name).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids = file.tensor("prompt_ids").unwrap();
    let numbers: Vec<i32> =
        ids.data().chunks(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect();
    let mut tensors = HashMap::new();
    let mut keep = |name: String, tensor: TensorView<'_>| {
        let mut data = tensor.data().to_vec();
        if half {
            data = data.chunks(4).flat_map(|b| [b[2], b[3]]).collect();
        }
        let dtype = if half { Dtype::BF16 } else { Dtype::F32 };
        tensors.insert(name, (dtype, tensor.shape().to_vec(), data));
    };
    keep("logits".into(), file.tensor("prefill_logits_f32").unwrap());
    for layer in 0.. {
        let Ok(hidden) = file.tensor(&format!("hidden_f32.{layer}")) else { break };
        keep(format!("hidden.{layer}"), hidden);
    }
    let views =
        tensors.iter().map(|(n, (t, s, d))| (n, TensorView::new(*t, s.clone(), d).unwrap()));
    (serde_json::to_vec(&numbers).unwrap(), safetensors::serialize(views, None).unwrap())
}

#[test]
fn logits_of_another_engine_agree_within_the_tolerance() {
    for (name, half, tolerance) in [("qwen3_moe", false, "1e-3"), ("qwen3_5_moe", true, "5e-2")] {
        let folder = Folder::new();
        let (ids, other) = golden(name, half);
        std::fs::write(folder.path("ids.json"), ids).unwrap();
        let (theirs, model) = (folder.path("theirs.safetensors"), moeflux_goldens::golden(name));
        std::fs::write(&theirs, other).unwrap();
        let args = ["--model", model.to_str().unwrap(), "--exact", "--trace", "--compare", &theirs];
        let strict = folder.logits(&args);
        assert_eq!(strict.code, 1, "{strict:?}");
        let said = folder.logits(&[&args[..], &["--tolerance", tolerance]].concat());
        assert!(
            said.code == 0 && said.out.contains("no difference beyond the tolerance"),
            "{said:?}"
        );
    }
}

#[test]
fn bad_files_are_refused() {
    let folder = Folder::new();
    for (text, problem) in [
        ("[]", "the array is empty"),
        ("[1, -1]", "not a JSON array of token ids"),
        ("{\"a\": 1}", "not a JSON array of token ids"),
        ("[1, 2", "not a JSON array of token ids"),
        ("[1, 4096]", "token id 4096 is outside the vocabulary of 4096"),
    ] {
        std::fs::write(folder.path("ids.json"), text).unwrap();
        assert_error(&folder.logits(&["--out", &folder.path("a.safetensors")]), 1, &[problem]);
    }
    // No partial file is left.
    assert_eq!(folder.files(), ["ids.json"]);
    std::fs::write(folder.path("ids.json"), "[1, 2]").unwrap();
    assert_error(
        &folder.logits(&["--out", &folder.path("no/such/a.safetensors")]),
        1,
        &["no/such/a.safetensors"],
    );
    assert_error(&folder.logits(&["--out", &folder.path("")]), 1, &["folder"]);
    assert_error(
        &folder.logits(&["--prefill", "3", "--out", "x"]),
        2,
        &["--prefill 3", "2 tokens"],
    );
    let other = folder.path("other.safetensors");
    let header = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
    for bytes in [
        b"".to_vec(),
        u64::MAX.to_le_bytes().to_vec(),
        header("{"),
        header(r#"{"logits":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}"#),
        header(r#"{"logits":{"dtype":"F32","shape":[1,2],"data_offsets":[8,0]}}"#),
        header(
            r#"{"logits":{"dtype":"F32","shape":[18446744073709551615,8],"data_offsets":[0,8]}}"#,
        ),
        header(
            r#"{"logits":{"dtype":"F32","shape":[0,18446744073709551615],"data_offsets":[0,0]}}"#,
        ),
    ] {
        std::fs::write(&other, &bytes).unwrap();
        let said = run(&["logits", "--out", &other, "--compare", &other]);
        assert_error(&said, 1, &[]);
    }
    std::fs::write(&other, header("{}")).unwrap();
    assert_error(&run(&["logits", "--out", &other, "--compare", &other]), 1, &["no tensor"]);
}
