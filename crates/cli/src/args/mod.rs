//! Command line arguments and their help texts.

mod answer;
mod bench;
mod command;
mod engine;
mod experts_on_host;
mod headings;
mod hub;
mod images;
mod model;
mod persist;
mod serve;
mod tools;
mod values;

pub(crate) use answer::{AnswerArgs, CHAT_COMMANDS, ChatArgs, FormArgs, RunArgs, Switch};
pub(crate) use bench::{BenchArgs, DoctorArgs, FigureArgs, PlanArgs};
pub(crate) use command::{Cli, Command, parse};
pub(crate) use engine::{
    AutoSwitch, ComputeArgs, EngineArgs, IoMode, MemoryArgs, ReadArgs, ReaderChoice,
};
pub(crate) use experts_on_host::HostExpertsArg;
pub(crate) use hub::{ListArgs, PullArgs, RmArgs, ShowArgs};
pub(crate) use images::{ImageArgs, TowerPlace};
pub(crate) use model::{ModelArgs, TokenizerArgs};
pub(crate) use persist::PersistArgs;
pub(crate) use serve::ServeArgs;
pub(crate) use tools::{
    DevicesArgs, InspectArgs, LogitsArgs, ManArgs, PackArgs, PerplexityArgs, ReplayArgs, SynthArgs,
    TokenizeArgs, VisionArgs,
};
pub(crate) use values::{parse_card_sizes, parse_size, parse_size_or_zero};
