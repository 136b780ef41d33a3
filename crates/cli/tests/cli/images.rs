//! Prompts with images: `run`, `chat`, `logits`, `tokenize` and `serve` with a small random model,
//! against what transformers makes of it.

use std::io::{BufRead, BufReader};

use base64::{Engine, engine::general_purpose::STANDARD};
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::{serve::Served, *};

/// Arguments of an exact answer of four tokens.
const ANSWER: [&str; 6] = ["--exact", "--temperature", "0", "-n", "4", "--model"];

const QUESTION: &str = "What is this?";

fn model() -> String {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../moeflux/tests/data/vision");
    data.join("qwen3_5_moe").to_str().unwrap().to_owned()
}

fn picture() -> String {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/data/images");
    images.join("gradient.png").to_str().unwrap().to_owned()
}

/// Numbers of transformers, of the prompt with this picture.
fn golden(name: &str) -> Vec<[u8; 4]> {
    let bytes = std::fs::read(Path::new(&model()).join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensor(&format!("one.{name}")).unwrap().data().as_chunks().0.to_vec()
}

fn ids(name: &str) -> Vec<u32> {
    golden(name).into_iter().map(u32::from_le_bytes).collect()
}

/// The answer of `run` as text.
fn answered() -> String {
    succeed(&[&["run"], &ANSWER[..], &[&model(), "--image", &picture(), QUESTION]].concat())
}

#[test]
fn run_answers_about_a_picture_as_transformers_does() {
    let (model, picture) = (model(), picture());
    let args = [&["run", "--json"], &ANSWER[..], &[&model, "--image", &picture, QUESTION]].concat();
    let report: Value = serde_json::from_str(&succeed(&args)).unwrap();
    assert_eq!(report["tokens"], json!(ids("gen_ids")));
    assert_eq!(report["prompt_tokens"], json!(ids("ids").len()));
    let refused = |args: &[&str], words: &str| {
        let said = run(args);
        assert!(said.code != 0 && said.err.contains(words), "{said:?}");
    };
    let raw = ["run", "--raw", "--model", &model, "--image", &picture, QUESTION];
    refused(&raw, "leave --raw out");
    refused(&["run", "--image", &picture, QUESTION], "this model reads text only");
    let text = Path::new(&model).join("config.json");
    let text = ["run", "--model", &model, "--image", text.to_str().unwrap(), QUESTION];
    refused(&text, "expected a PNG, JPEG");
    let shown = ["--image", &picture, "--model", &model, QUESTION];
    let with = |args: &[&str], words: &str| refused(&[&["run"], args, &shown[..]].concat(), words);
    with(&["--vision", "off"], "leave --vision off out");
    with(&["--image-memory", "1KiB"], "the memory plan has 0 MiB for them");
    let small = ["run", "--image-max-tokens", "8", "-n", "1", "--model", &model];
    let said = run(&[&small[..], &["--image", &picture, QUESTION]].concat());
    assert!(said.err.contains("--image-max-tokens raises it"), "{said:?}");
}

#[test]
fn chat_takes_pictures_by_command_and_by_path() {
    let expected = answered();
    let (model, picture) = (model(), picture());
    for shown in [format!("/image {picture}"), picture.clone(), format!("'{picture}'")] {
        let args = [&["chat"], &ANSWER[..], &[&model]].concat();
        let said = with_stdin(&args, format!("{shown}\n{QUESTION}\n").as_bytes());
        assert_eq!((said.code, &*said.out), (0, &*expected), "{said:?}");
    }
}

#[test]
fn a_picture_that_changes_is_not_mistaken_for_the_one_that_was_shown() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.png").to_str().unwrap().to_owned();
    std::fs::copy(picture(), &path).unwrap();
    let other = Path::new(&picture()).with_file_name("rgb16.png");
    let mut chat = moeflux([&["chat"], &ANSWER[..], &[&model()]].concat());
    chat.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut chat = chat.spawn().unwrap();
    let mut input = chat.stdin.take().unwrap();
    let mut said = BufReader::new(chat.stderr.take().unwrap()).lines().map(Result::unwrap);
    writeln!(input, "/image {path}\n/image {}", other.display()).unwrap();
    assert!(said.any(|line| line.contains("rgb16.png: ")));
    std::fs::copy(&other, &path).unwrap();
    writeln!(input, "{QUESTION}").unwrap();
    drop(input);
    let rest: Vec<_> = said.collect();
    let refused = rest.iter().any(|line| line.contains("the picture has changed since it was"));
    assert!(refused && !chat.wait().unwrap().success(), "{rest:?}");
}

#[test]
fn a_saved_session_keeps_its_pictures() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("session").to_str().unwrap().to_owned();
    let (model, picture) = (model(), picture());
    let args = [&["chat"], &ANSWER[..], &[&model]].concat();
    let saved = [&args[..], &["--session", &file]].concat();
    let shown = format!("/image {picture}\n{QUESTION}\n");
    let one = with_stdin(&args, shown.as_bytes());
    let both = with_stdin(&saved, format!("{shown}{QUESTION}\n").as_bytes());
    assert!(both.code == 0 && both.out.starts_with(&one.out), "{both:?}");
    assert!(both.out.len() > one.out.len(), "{both:?}");
    std::fs::remove_file(&file).unwrap();
    with_stdin(&saved, shown.as_bytes());
    let next = with_stdin(&saved, format!("{QUESTION}\n").as_bytes());
    assert_eq!((next.code, one.out + &next.out), (0, both.out), "{next:?}");
    let refused = with_stdin(&saved, format!("/image {picture}\n").as_bytes());
    assert!(refused.code != 0 && refused.err.contains("/reset starts a new one"), "{refused:?}");
    let refused = with_stdin(&[&saved[..], &["--image", &picture]].concat(), b"");
    assert!(refused.code != 0 && refused.err.contains("/reset starts a new one"), "{refused:?}");
}

#[test]
fn logits_of_a_picture_are_those_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (tokens, out) = (path("tokens.json"), path("logits.safetensors"));
    let given = [ids("short_ids"), ids("gen_ids")].concat();
    std::fs::write(&tokens, serde_json::to_string(&given).unwrap()).unwrap();
    let prefill = ids("short_ids").len().to_string();
    let (model, picture) = (model(), picture());
    let args = ["logits", "--exact", "--model", &model, "--tokens", &tokens, "--out", &out];
    for prefill in [&prefill, "3"] {
        succeed(&[&args[..], &["--prefill", prefill, "--image", &picture]].concat());
        let bytes = std::fs::read(&out).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
        let expanded = [golden("ids"), golden("gen_ids")].concat();
        assert_eq!(words("tokens"), expanded);
        assert_eq!(words("position_ids"), golden("position_ids"));
        assert_eq!(file.tensor("position_ids").unwrap().shape(), [3, expanded.len()]);
        let floats = |words: Vec<[u8; 4]>| words.into_iter().map(f32::from_le_bytes);
        let most = floats(words("logits")).zip(floats(golden("logits")));
        let most = most.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(most < 1e-4, "{most:e}");
    }
    let said = run(&args);
    assert_eq!(said.code, 0, "a placeholder without a picture is a token: {said:?}");
}

#[test]
fn tokenize_repeats_the_placeholder_of_a_picture() {
    let text = "<|vision_start|><|image_pad|><|vision_end|>";
    let (model, picture) = (model(), picture());
    let args = ["tokenize", "--ids", "--model", &model, "--image", &picture];
    let said = succeed(&[&args[..], &[text]].concat());
    let tokens: Vec<u32> = serde_json::from_str(&said).unwrap();
    assert_eq!(tokens, [&[260][..], &[262; 12], &[261]].concat());
    let said = run(&[&args[..], &["no placeholder"]].concat());
    assert!(said.code != 0 && said.err.contains("expected 1 placeholders"), "{said:?}");
}

#[test]
fn inspect_names_the_tower() {
    let said = succeed(&["inspect", "--model", &model()]);
    assert!(said.contains("images        tower of 3 blocks"), "{said}");
}

#[test]
fn serve_answers_about_a_picture() {
    let server = Served::start(&["--exact", "--ctx", "512", "--model", &model()]);
    let picture = STANDARD.encode(std::fs::read(picture()).unwrap());
    let url = format!("data:image/png;base64,{picture}");
    let content = json!([
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]);
    let messages = json!([{"role": "user", "content": content}]);
    let ask = json!({"messages": messages, "max_tokens": 4, "temperature": 0}).to_string();
    let expected = answered();
    for _ in 0..2 {
        let reply = server.post("/v1/chat/completions", &ask);
        let body: Value = serde_json::from_str(reply.split_once("\r\n\r\n").unwrap().1).unwrap();
        let text = body["choices"][0]["message"]["content"].as_str().unwrap();
        assert_eq!(text, expected.trim_end_matches('\n'), "{reply}");
        assert_eq!(body["usage"]["prompt_tokens"], json!(ids("ids").len()));
    }
    let media = json!({
        "prompt": {
            "prompt_string": format!(
                "<|im_start|>user<__media__>{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
            ),
            "multimodal_data": [picture],
        },
        "n_predict": 4,
        "temperature": 0,
    });
    let reply = server.post("/completion", &media.to_string());
    let body: Value = serde_json::from_str(reply.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(body["content"], expected.trim_end_matches('\n'), "{reply}");
    server.end("-TERM");
}
