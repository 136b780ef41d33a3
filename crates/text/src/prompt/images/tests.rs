//! Tests of images in prompts. The fixtures are the tokenizer, the template and the prompts of tiny
//! checkpoints of `qwen3_5_moe` and `qwen3_vl_moe`, which have the same; the ids come from
//! transformers' processor.

use std::{collections::BTreeMap, path::Path};

use serde::Deserialize;
use serde_json::Value as Json;

use crate::{
    chat::{
        ChatOptions, Message, MessageImage,
        normal_form::tests::{TEMPLATES, call, calling, template},
    },
    prompt::{ChatPrompt, PlacedImage, Turn},
    text::Text,
    tokenizer::Tokenizer,
};

const QWEN: &str = include_str!("../fixtures/chat_template.jinja");
const TOKENIZER: &str = include_str!("../fixtures/tokenizer.json");
const IMAGE: u32 = 262;
/// `<|im_end|>`.
const END: u32 = 259;

/// Shows images of questions only, and calls if `CALLS` stands for their part.
const STRICT: &str = "{% for m in messages %}{% if m.role == 'system' and not loop.first or \
    not loop.first and m.role == messages[loop.index0 - 1].role and m.role != 'tool' %}\
    {{ raise_exception('not in turns') }}{% endif %}[{{ m.role }}]\
    {% if m.content is string %}{{ m.content }}{% elif m.role == 'user' %}\
    {% for c in m.content %}{{ '<|image_pad|>' if c.type == 'image' else c.text }}{% endfor %}\
    {% elif m.role == 'system' %}{{ raise_exception('System message cannot contain images.') }}\
    {% elif m.role == 'tool' %}{{ raise_exception('a result is text') }}{% endif %}CALLS\
    {% endfor %}";
const CALLS: &str = "{% for c in m.tool_calls or [] %}({{ c.function.name }}\
    {{ c.function.arguments | tojson }}){% endfor %}";

fn text_of(source: &str, tokenizer_json: &str) -> Text {
    let path = Path::new("tokenizer.json");
    let tokenizer = Tokenizer::from_bytes(tokenizer_json.as_bytes(), path).unwrap();
    let mut text = Text::for_template(template(source), tokenizer).with_end(&[END]);
    text.set_image_token(Some(IMAGE));
    text
}

fn qwen() -> Text {
    text_of(QWEN, TOKENIZER)
}

/// With the same text before an answer in each of its prompts, as published templates have it.
fn in_turns() -> Text {
    text_of(&QWEN.replace("assistant\\n", "assistant"), TOKENIZER)
}

fn image(at: usize, tokens: usize, digest: u8) -> MessageImage {
    MessageImage { at, tokens, digest: [digest; 32] }
}

fn options() -> ChatOptions {
    ChatOptions::default()
}

/// The first bytes of the digests of a prompt's images.
fn digests(prompt: &ChatPrompt) -> Vec<u8> {
    prompt.images.iter().map(|image| image.digest[0]).collect()
}

/// Text of a conversation, and the digests of its images in order.
fn shown(text: &Text, messages: &[Message]) -> (String, Vec<u8>) {
    let prompt = text.prompt(messages, &options()).unwrap();
    (text.render(messages, &options()).unwrap(), digests(&prompt))
}

fn error<T: std::fmt::Debug>(result: Result<T, moeflux_base::Error>) -> String {
    result.unwrap_err().to_string()
}

/// A prompt of transformers.
#[derive(Deserialize)]
struct Published {
    messages: Vec<PublishedMessage>,
    text: String,
    short_ids: Vec<u32>,
    ids: Vec<u32>,
}

/// A message whose content is a list of texts, and of images as their numbers of tokens.
#[derive(Deserialize)]
struct PublishedMessage {
    role: String,
    content: Vec<Json>,
}

impl PublishedMessage {
    fn message(&self) -> Message {
        let mut message = Message::new(&*self.role, "");
        for part in &self.content {
            match part.as_u64() {
                Some(tokens) => {
                    let at = message.content.len();
                    message.images.push(image(at, tokens as usize, tokens as u8));
                }
                None => message.content += part.as_str().unwrap(),
            }
        }
        message
    }
}

#[test]
fn prompts_are_those_of_transformers() {
    let text = qwen();
    let prompts: BTreeMap<String, Published> =
        serde_json::from_str(include_str!("../fixtures/prompts.json")).unwrap();
    assert_eq!(prompts.len(), 7);
    for (name, published) in &prompts {
        let messages: Vec<_> = published.messages.iter().map(PublishedMessage::message).collect();
        let images: Vec<_> = messages.iter().flat_map(|m| &m.images).copied().collect();
        let rendered = text.render(&messages, &options()).unwrap();
        assert_eq!(rendered, published.text, "{name}");
        let short = text.tokenizer().encode(&rendered, false).unwrap();
        assert_eq!(short, published.short_ids, "{name}");
        let prompt = text.prompt(&messages, &options()).unwrap();
        assert_eq!(prompt.tokens, published.ids, "{name}");
        assert_eq!(text.chat(&messages, &options()).unwrap(), published.ids, "{name}");
        assert_eq!(text.count_after(&messages, &options(), []).unwrap(), published.ids.len());
        let expanded = text.expand_images(&short, &images).unwrap();
        assert_eq!((expanded.tokens, &expanded.images), (prompt.tokens.clone(), &prompt.images));
        // Each image is a whole run of placeholders.
        let runs = prompt.tokens.chunk_by(|a, b| (*a == IMAGE) == (*b == IMAGE));
        let runs: Vec<_> = runs.filter(|run| run[0] == IMAGE).map(<[u32]>::len).collect();
        assert_eq!(runs, images.iter().map(|image| image.tokens).collect::<Vec<_>>(), "{name}");
        for (placed, given) in prompt.images.iter().zip(&images) {
            assert_eq!((placed.tokens, placed.digest), (given.tokens, given.digest), "{name}");
            assert_ne!(prompt.tokens[placed.place - 1], IMAGE, "{name}");
            assert_eq!(prompt.tokens[placed.place], IMAGE, "{name}");
        }
    }
}

#[test]
fn a_placeholder_that_a_message_spells_is_text() {
    // Some tokenizers do not say that it is special.
    let common = {
        let mut json: Json = serde_json::from_str(TOKENIZER).unwrap();
        json["added_tokens"][6]["special"] = Json::Bool(false);
        json.to_string()
    };
    for text in [qwen(), text_of(QWEN, &common)] {
        assert_eq!(text.image_token(), Some(IMAGE));
        for spelled in ["<|image_pad|>", "a<|image_pad|><|im_end|>b<|image_pad|>"] {
            let messages = [Message::user(spelled)];
            let prompt = text.prompt(&messages, &options()).unwrap();
            assert!(!prompt.tokens.contains(&IMAGE) && prompt.images.is_empty(), "{spelled}");
            let decoded = text.tokenizer().decode(&prompt.tokens, false).unwrap();
            assert_eq!(decoded, text.render(&messages, &options()).unwrap());
            // Also beside an image, and around it.
            for at in [0, 7, spelled.len()] {
                let messages = [Message::user(spelled).images(vec![image(at, 3, 1)])];
                let tokens = text.chat(&messages, &options()).unwrap();
                assert_eq!(tokens.iter().filter(|id| **id == IMAGE).count(), 3, "{spelled} {at}");
            }
        }
    }
}

#[test]
fn another_number_of_placeholders_is_refused() {
    let text = qwen();
    let images = [image(0, 2, 1), image(0, 1, 2)];
    let expanded = text.expand_images(&[1, IMAGE, IMAGE, 5], &images).unwrap();
    assert_eq!(expanded.tokens, [1, IMAGE, IMAGE, IMAGE, 5]);
    assert_eq!(expanded.images.iter().map(|i| i.place).collect::<Vec<_>>(), [1, 3]);
    for (tokens, given, got) in [(&[IMAGE][..], 2, "got 1"), (&[IMAGE, IMAGE], 1, "got 2")] {
        let problem = error(text.expand_images(tokens, &images[..given]));
        assert!(
            problem.contains(&format!(
                "expected {given} placeholders of images (token 262), one for each image, {got}"
            )),
            "{problem}"
        );
    }
    let empty = error(text.expand_images(&[IMAGE], &[image(0, 0, 1)]));
    assert!(empty.contains("at least one token, got one of 0"), "{empty}");
    // This template drops images in answers.
    let messages = [
        Message::user("a"),
        Message::assistant("b").images(vec![image(0, 1, 1)]),
        Message::user("c"),
    ];
    let strict = text_of(&STRICT.replace("CALLS", ""), TOKENIZER);
    for problem in [
        error(strict.chat(&messages, &options())),
        error(strict.prompt(&messages, &options())),
        error(strict.count_after(&messages, &options(), [])),
    ] {
        assert!(
            problem.contains(
                "expected 1 placeholders of images (token 262), one for each image, got 0"
            ),
            "{problem}"
        );
    }
    // A model of text alone.
    let mut plain = qwen();
    for id in [None, Some(5), Some(70_000)] {
        plain.set_image_token(id);
        assert_eq!(plain.image_token(), None);
        let problem = error(plain.prompt(&[messages[1].clone()], &options()));
        assert!(problem.contains("no placeholder for images"), "{problem}");
    }
}

#[test]
fn images_outside_of_the_content_are_refused() {
    let text = qwen();
    for (images, part) in [
        (vec![image(4, 1, 1)], "3 bytes of content, got offset 4 after 0"),
        (vec![image(2, 1, 1)], "got offset 2"),
        (vec![image(3, 1, 1), image(0, 1, 1)], "got offset 0 after 3"),
    ] {
        let messages = [Message::user("a"), Message::user("aé").images(images)];
        let problems = [
            error(text.render(&messages, &options())),
            error(text.template().unwrap().render(&messages, true, &options())),
        ];
        for problem in problems {
            assert!(problem.contains("messages[1].images: expected images"), "{problem}");
            assert!(problem.contains(part), "{problem}");
        }
    }
}

#[test]
fn the_tokens_of_images_count_for_the_context() {
    let mut text = qwen();
    let asked =
        |tokens| [Message::user("ab").images(vec![image(0, tokens, 1), image(2, tokens, 2)])];
    let length = text.chat(&asked(10), &options()).unwrap().len();
    text.limit_prompts(length);
    assert!(text.chat(&asked(10), &options()).is_ok());
    for tokens in [11, u32::MAX as usize, usize::MAX] {
        assert!(error(text.chat(&asked(tokens), &options())).contains("context"));
        assert!(error(text.prompt(&asked(tokens), &options())).contains("context"));
        let counted = text.count_after(&asked(tokens), &options(), []).unwrap();
        assert!(counted == tokens.saturating_sub(10).saturating_mul(2).saturating_add(length));
    }
}

#[test]
fn images_stay_at_their_places_in_the_normal_form() {
    let text = text_of(&STRICT.replace("CALLS", ""), TOKENIZER);
    let with = |message: Message, images: &[(usize, u8)]| {
        message.images(images.iter().map(|(at, digest)| image(*at, 2, *digest)).collect())
    };
    let pad = "<|image_pad|>";
    // Questions that are merged, and a system message that becomes a reminder.
    let messages = [
        with(Message::user("ab"), &[(1, 1)]),
        with(Message::user("cd"), &[(0, 2), (2, 3)]),
        with(Message::new("system", "ef"), &[(1, 4)]),
        Message::assistant("g"),
        with(Message::user(""), &[(0, 5)]),
    ];
    let merged = format!("a{pad}b\n\n{pad}cd{pad}");
    let reminder = format!("<system-reminder>\ne{pad}f\n</system-reminder>");
    let expected = format!("[user]{merged}\n\n{reminder}[assistant]g[user]{pad}");
    assert_eq!(shown(&text, &messages), (expected, vec![1, 2, 3, 4, 5]));
    // The template's own reason.
    let system = [with(Message::system("a"), &[(1, 1)]), Message::user("b")];
    assert!(error(text.render(&system, &options())).contains("System message cannot contain"));
    assert_eq!(
        qwen().render(&system, &options()).unwrap().split("<|im_end|>").next().unwrap(),
        format!("<|im_start|>systema<|vision_start|>{pad}<|vision_end|>")
    );
    // Results are text of the user.
    let messages = [
        Message::user("a"),
        calling(&[call("x", "f", "{}"), call("y", "g", "{}")]),
        with(Message::tool("y", "late"), &[(4, 2)]),
        with(Message::tool("x", "soon"), &[(0, 1)]),
    ];
    let (rendered, order) = shown(&text, &messages);
    let response = |text| format!("<tool_response>\n{text}\n</tool_response>");
    let responses = [format!("{pad}soon"), format!("late{pad}")].map(response).join("\n\n");
    assert!(rendered.ends_with(&format!("[user]{responses}")), "{rendered}");
    assert_eq!(order, [1, 2]);
}

#[test]
fn images_of_results_are_in_them_or_after_them() {
    let strict = STRICT.replace("CALLS", CALLS);
    let pad = "<|image_pad|>";
    let messages = [
        Message::user("a"),
        calling(&[call("x", "f", "{}"), call("y", "g", "{}")]),
        Message::tool("y", "").images(vec![image(0, 2, 2), image(0, 2, 3)]),
        Message::tool("x", "soon").images(vec![image(2, 2, 1)]),
        Message::user("b").images(vec![image(1, 2, 4)]),
    ];
    // The template does not take them in results.
    let text = text_of(&strict, TOKENIZER);
    let calls = "[user]a[assistant](f{})(g{})";
    let results = "[tool]so(image below)on[tool](image below)(image below)";
    let below =
        format!("From the result of f:\n{pad}\n\nFrom the result of g:\n{pad}{pad}\n\nb{pad}");
    let expected = format!("{calls}{results}[user]{below}");
    assert_eq!(shown(&text, &messages), (expected, vec![1, 2, 3, 4]));
    // It does.
    let text = text_of(&strict.replace("m.role == 'user'", "m.role != 'system'"), TOKENIZER);
    let expected = format!("{calls}[tool]so{pad}on[tool]{pad}{pad}[user]b{pad}");
    assert_eq!(shown(&text, &messages), (expected, vec![1, 2, 3, 4]));
}

#[test]
fn templates_without_images_say_so() {
    let asked = [Message::user("What is this?").images(vec![image(0, 2, 1)])];
    let dropping = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
                    {% for c in m.content %}{{ c.text }}\n{% endfor %}{% endif %}{% endfor %}";
    let templates = TEMPLATES.into_iter().chain([("dropping", dropping)]);
    // Kimi's has them.
    for (name, source) in templates.filter(|(name, _)| *name != "kimi") {
        let text = text_of(source, TOKENIZER);
        let problem = error(text.render(&asked, &options()));
        assert!(problem.contains("chat template takes no images"), "{name}: {problem}");
    }
    // Images may be before all text.
    let first = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}\
                 {% for c in m.content if c.type == 'image' %}<|image_pad|>{% endfor %}\
                 {% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}{% endif %}\
                 {% endfor %}";
    let text = text_of(first, TOKENIZER);
    let messages = [Message::user("ab").images(vec![image(1, 2, 1), image(2, 2, 2)])];
    assert_eq!(shown(&text, &messages), ("<|image_pad|><|image_pad|>ab".into(), vec![1, 2]));
}

#[test]
fn a_turn_continues_only_with_its_images() {
    let text = in_turns();
    let asked = |digest, tokens| {
        let system = Message::system("Look.").images(vec![image(5, 3, 9)]);
        vec![system, Message::user("What?").images(vec![image(0, tokens, digest)])]
    };
    let then = |mut messages: Vec<Message>, answer: Message| {
        messages.extend([answer, Message::user("And?").images(vec![image(4, 2, 7)])]);
        messages
    };
    let first = text.prompt(&asked(1, 4), &options()).unwrap();
    // A placeholder that the model generates is a token of text.
    let made = [&text.encode("A ramp. ").unwrap()[..], &[260, IMAGE, 261]].concat();
    let spelled = "A ramp.<|vision_start|><|image_pad|><|vision_end|>";
    let turn = Turn::new(first.clone(), &made);
    assert!(
        turn.bytes() > Turn::new(ChatPrompt { images: vec![], ..first.clone() }, &made).bytes()
    );
    let json = serde_json::to_string(&turn).unwrap();
    assert_eq!(serde_json::from_str::<Turn>(&json).unwrap(), turn);

    let next = then(asked(1, 4), Message::assistant(spelled));
    let prompt = text.prompt_after(&next, &options(), [&turn]).unwrap();
    let plain = text.prompt(&next, &options()).unwrap();
    assert!(prompt.tokens.starts_with(turn.tokens()) && !plain.tokens.starts_with(turn.tokens()));
    assert_eq!(digests(&prompt), [9, 1, 7]);
    assert!(prompt.images.starts_with(&first.images));
    assert_eq!(prompt.tokens[prompt.images[2].place..][..3], [IMAGE, IMAGE, 261]);
    assert_ne!(prompt.tokens[prompt.images[2].place - 1], IMAGE);
    let counted = text.count_after(&next, &options(), [&turn]).unwrap();
    assert_eq!(counted, prompt.tokens.len());

    // Another picture, another size of it, an image in the answer.
    let answer = Message::assistant(spelled);
    let in_answer = Message::assistant("A ramp.").images(vec![image(7, 1, 1)]);
    for other in [
        then(asked(2, 4), answer.clone()),
        then(asked(1, 5), answer.clone()),
        then(asked(1, 4), in_answer),
    ] {
        let plain = text.prompt(&other, &options()).unwrap();
        assert_eq!(text.prompt_after(&other, &options(), [&turn]).unwrap(), plain);
        let counted = text.count_after(&other, &options(), [&turn]).unwrap();
        assert_eq!(counted, plain.tokens.len());
    }
    // Places that a damaged file gives.
    let place = first.images[1].place;
    for damaged in [place - 1, place + 1, first.images[0].place, 1000, usize::MAX] {
        let mut turn = turn.clone();
        turn.images[1].place = damaged;
        assert_eq!(text.prompt_after(&next, &options(), [&turn]).unwrap(), plain, "{damaged}");
    }
}

#[test]
fn turns_that_were_written_without_images_are_read() {
    let text = in_turns();
    let asked = vec![Message::user("Hi")];
    let turn = Turn::new(text.prompt(&asked, &options()).unwrap(), &text.encode("Ho").unwrap());
    let json = serde_json::to_value(&turn).unwrap();
    assert!(json.get("images").is_none());
    let turn: Turn = serde_json::from_value(json).unwrap();
    let next = [&asked[..], &[Message::assistant("Ho"), Message::user("So?")]].concat();
    let with = [&next[..2], &[Message::user("So?").images(vec![image(0, 2, 1)])]].concat();
    for (messages, images) in [(next, vec![]), (with, vec![1])] {
        let prompt = text.prompt_after(&messages, &options(), [&turn]).unwrap();
        assert!(prompt.tokens.starts_with(turn.tokens()));
        assert_eq!(digests(&prompt), images);
    }
}

#[test]
fn ends_are_prefixes_outside_of_images() {
    let text = in_turns();
    let asked = vec![
        Message::system("Look."),
        Message::user("What is it?").images(vec![image(0, 5, 1), image(0, 4, 2), image(7, 3, 3)]),
    ];
    let more = [Message::assistant("A ramp."), Message::user("").images(vec![image(0, 6, 4)])];
    let next = [&asked[..], &more].concat();
    let first = text.prompt(&asked, &options()).unwrap();
    let second = text.prompt(&next, &options()).unwrap();
    for prompt in [&first, &second] {
        assert!(prompt.ends.is_sorted() && prompt.ends.last() == Some(&prompt.tokens.len()));
        for PlacedImage { place, tokens, .. } in &prompt.images {
            let inside = |end: &usize| place < end && *end < place + tokens;
            assert!(!prompt.ends.iter().any(inside), "{prompt:?}");
        }
    }
    // After the system message, and after the question: before the next turn.
    let same = first.tokens.iter().zip(&second.tokens).take_while(|(a, b)| a == b).count();
    let end = first.ends.iter().rev().find(|end| **end <= same).unwrap();
    assert!(*end > first.images[2].place + 3 && same - end <= 4, "{same}: {first:?}");
    assert!(first.ends[0] < first.images[0].place && first.ends[0] > 8, "{first:?}");
    let turn = Turn::new(first, &text.encode("A ramp.").unwrap());
    assert_eq!(text.prompt_after(&next, &options(), [&turn]).unwrap().ends, second.ends);
}

#[test]
fn a_raw_prompt_starts_once() {
    let text = qwen();
    let images = [image(0, 2, 1), image(0, 3, 2)];
    let prompt = text.encode_with_images("What?", &images).unwrap();
    let one = text.encode_with_images("", &images[..1]).unwrap().tokens;
    let other = text.encode_with_images("", &images[1..]).unwrap().tokens;
    let rest = text.encode_continuation("What?").unwrap();
    let start = text.encode("").unwrap();
    assert!(one.starts_with(&start));
    assert_eq!(prompt.tokens, [&one, &other[start.len()..], &rest].concat());
    let mut of_text = qwen();
    of_text.set_image_token(None);
    let prompt = of_text.encode_with_images("What?", &[]).unwrap();
    assert_eq!(prompt.tokens, of_text.encode("What?").unwrap());
}
