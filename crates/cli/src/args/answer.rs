//! Arguments of `run` and `chat`: the prompt, sampling, the end and the form of an answer.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{Args, ValueEnum, builder::NonEmptyStringValueParser};

use super::{
    engine::{EngineArgs, TraceArgs},
    headings::{ANSWER, IMAGES, SAMPLING},
    images::ImageArgs,
    persist::PersistArgs,
    values::{path, within},
};

/// Sampling, and the end of an answer.
#[derive(Debug, Args)]
#[command(next_help_heading = SAMPLING)]
pub(crate) struct AnswerArgs {
    /// 0 always takes the most probable token; higher values vary more
    #[arg(long, value_name = "T", value_parser = within(0.0, f32::MAX), allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Sample from the K most probable tokens; 0 is all
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<usize>,
    /// Sample from the most probable tokens with a total probability of P; 1 is all
    #[arg(long, value_name = "P", value_parser = within(f32::MIN_POSITIVE, 1.0), allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Sample from tokens at least P times as probable as the most probable one; 0 is all
    #[arg(long, value_name = "P", value_parser = within(0.0, 1.0), allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Divide the logits of tokens in prompt and answer by R; 1 is off
    #[arg(long, value_name = "R", value_parser = within(f32::MIN_POSITIVE, f32::MAX), allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtract R from the logits of tokens in the answer; 0 is off
    #[arg(long, value_name = "R", value_parser = within(-2.0, 2.0), allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract R from a token's logit for each occurrence in the answer; 0 is off
    #[arg(long, value_name = "R", value_parser = within(-2.0, 2.0), allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Seed of sampling; the same seed gives the same answer [default: random]
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,
    /// End the answer before this text; may be repeated
    #[arg(long, value_name = "TEXT", help_heading = ANSWER, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) stop: Vec<String>,
    /// End the answer at this token, such as '<|im_end|>', too; may be repeated
    ///
    /// By its text or its id, besides the tokens that the model's files name.
    #[arg(long, value_name = "TOKEN", help_heading = ANSWER, value_parser = NonEmptyStringValueParser::new())]
    pub(crate) end_token: Vec<String>,
    /// Maximum tokens of an answer [default: as many as the context holds]
    #[arg(short = 'n', long, value_name = "N", help_heading = ANSWER)]
    pub(crate) max_tokens: Option<NonZeroUsize>,
    /// Turn thinking on or off, if the chat template supports it
    #[arg(long, value_name = "on|off", help_heading = ANSWER)]
    pub(crate) thinking: Option<Switch>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

/// Options that `run` and `chat` share.
#[derive(Debug, Args)]
pub(crate) struct GenerationArgs {
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
    #[command(flatten)]
    pub(crate) persist: PersistArgs,
    /// Image before the text of the first question; may be repeated
    #[arg(long, value_name = "FILE", value_parser = path(), help_heading = IMAGES)]
    pub(crate) image: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) images: ImageArgs,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

const RUN_EXAMPLES: &str = "\
Examples:
  moeflux run \"Tell me the fable of The Fox and the Crow.\"
  moeflux run --memory 48MiB \"Tell me the story of The Wolf and the Crane.\"
  moeflux run --temperature 0.7 --seed 1 --max-tokens 200 \"Once upon a time\"
  git diff | moeflux run --model DIR --system \"Write a commit message.\" -
  moeflux run --raw --stop . \"The capital of France is\"
  moeflux run --json-schema fable.schema.json \"Who are in The Fox and the Crow?\"
  moeflux run --session fox.session \"Tell me the fable of The Fox and the Crow.\"
  moeflux run --session fox.session \"And what became of the Crow?\"
  moeflux run --model DIR --image screenshot.png \"What is wrong here?\"
  moeflux run --model DIR --prefix-cache ~/.cache/prompts - < report-and-question.txt
  moeflux run --json --quiet \"Tell me the story of The Wolf and the Crane.\" | jq .statistics

Ctrl-C ends the answer and prints its statistics; the exit code is then 0, or 130 if there was
no answer yet. A second Ctrl-C ends the program at once.";

/// Answer one prompt
///
/// The answer is streamed to stdout. On a terminal, progress bars show loading and prefill.
/// Afterwards one line on stderr shows speed, bytes read per token, hit rate and peak memory.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// The prompt; `-`, or none if stdin is a pipe or a file, reads it from stdin
    ///
    /// Several words are one prompt, as if in quotes. One trailing line end of stdin is dropped.
    #[arg(value_name = "PROMPT | -")]
    pub(crate) prompt: Vec<String>,
    /// Pass the prompt as it is, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// System message
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Print one JSON object at the end: text, tokens, statistics
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) form: FormArgs,
    #[command(flatten)]
    pub(crate) generation: GenerationArgs,
}

/// Form of an answer, behind its thoughts.
#[derive(Debug, Args)]
#[group(id = "form", multiple = false)]
pub(crate) struct FormArgs {
    /// Answer with JSON that the JSON schema in this file accepts
    #[arg(long, value_name = "FILE", help_heading = ANSWER)]
    pub(crate) json_schema: Option<PathBuf>,
    /// Answer with text that this regular expression matches as a whole
    #[arg(long, value_name = "RE", help_heading = ANSWER)]
    pub(crate) regex: Option<String>,
    /// Answer with text of the Lark grammar in this file
    #[arg(long, value_name = "FILE", help_heading = ANSWER)]
    pub(crate) lark: Option<PathBuf>,
}

/// Commands of a conversation.
pub(crate) const CHAT_COMMANDS: &str = "  /help           list these commands
  /reset          forget the conversation, but not the system message
  /system [TEXT]  set or show the system message; - removes it
  /image FILE     show a picture with the next question; so does a line that is its path alone
  /stats          speed, bytes read, hit rate and memory so far
  /save FILE      write the conversation to a file
  /load FILE      continue a conversation from a file
  /quit           leave; so does Ctrl-D
A line that ends in \\ continues in the next one. Ctrl-C ends the answer, not the conversation.";

fn chat_help() -> String {
    format!(
        "In the conversation:\n{CHAT_COMMANDS}\n\nExamples:\n  moeflux chat --model DIR --memory 8GiB\n  \
         moeflux chat --model DIR --system \"You are a pirate.\" --temperature 0.8\n  \
         moeflux chat --model DIR --session pirate.session    # continues where it ended"
    )
}

/// Have a conversation
#[derive(Debug, Args)]
#[command(after_help = chat_help())]
pub(crate) struct ChatArgs {
    /// System message
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) generation: GenerationArgs,
}
