//! `moeflux.toml`: settings of the models that `serve --models` offers.

use std::{
    collections::BTreeMap,
    fmt,
    num::NonZeroUsize,
    path::{Path, PathBuf},
};

use anyhow::{Context, anyhow, bail};
use moeflux::{
    Sampling,
    checkpoint::RopeScaling,
    runtime::{CardBudgets, KvFormat},
};
use moeflux_server::KeepAlive;
use serde::{Deserialize, Deserializer, de};

use crate::{
    args::{HostExpertsArg, ServeArgs, parse_card_sizes, parse_size, parse_size_or_zero},
    folders,
    settings_text::{self, FILE},
};

/// Settings of all models.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct SettingsFile {
    /// Settings of models that do not have their own.
    defaults: ModelSettings,
    /// Settings by the name of the model.
    models: BTreeMap<String, ModelSettings>,
}

/// Settings of a model, named like the options of `serve` and the fields of requests.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct ModelSettings {
    /// Other names of the model in requests.
    pub(crate) aliases: Vec<String>,
    ctx: Option<NonZeroUsize>,
    sessions: Option<NonZeroUsize>,
    #[serde(deserialize_with = "size")]
    memory: Option<u64>,
    #[serde(deserialize_with = "card_sizes")]
    gpu_memory: Option<CardBudgets>,
    #[serde(deserialize_with = "size")]
    state_memory: Option<u64>,
    #[serde(deserialize_with = "size_or_zero")]
    prefix_memory: Option<u64>,
    #[serde(deserialize_with = "experts_on_host")]
    experts_on_host: Option<HostExpertsArg>,
    #[serde(deserialize_with = "kv_format")]
    kv: Option<KvFormat>,
    #[serde(deserialize_with = "rope_scaling")]
    rope_scaling: Option<RopeScaling>,
    tokenizer_pre: Option<String>,
    prefix_cache: Option<PathBuf>,
    #[serde(deserialize_with = "size")]
    prefix_cache_size: Option<u64>,
    #[serde(deserialize_with = "ttl")]
    ttl: Option<KeepAlive>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
}

/// Value of a text.
fn parsed<'de, D: Deserializer<'de>, T, E: fmt::Display>(
    deserializer: D,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<Option<T>, D::Error> {
    let text = String::deserialize(deserializer)?;
    parse(&text).map(Some).map_err(de::Error::custom)
}

fn size<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    parsed(deserializer, parse_size)
}

fn size_or_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    parsed(deserializer, parse_size_or_zero)
}

fn card_sizes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<CardBudgets>, D::Error> {
    parsed(deserializer, parse_card_sizes)
}

fn kv_format<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<KvFormat>, D::Error> {
    parsed(deserializer, KvFormat::by_name)
}

fn experts_on_host<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<HostExpertsArg>, D::Error> {
    parsed(deserializer, str::parse)
}

fn rope_scaling<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<RopeScaling>, D::Error> {
    parsed(deserializer, str::parse)
}

fn ttl<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<KeepAlive>, D::Error> {
    parsed(deserializer, str::parse)
}

impl SettingsFile {
    /// Reads the file in a folder of models, which need not exist. `names` are the models.
    ///
    /// # Errors
    /// The file cannot be read, has an unknown key or a wrong value, or names another model.
    pub(crate) fn read(folder: &Path, names: &[&str]) -> anyhow::Result<Self> {
        let path = folder.join(FILE);
        let Some(text) = settings_text::read(&path)? else { return Ok(Self::default()) };
        Self::parse(&text, names).with_context(|| path.display().to_string())
    }

    fn parse(text: &str, names: &[&str]) -> anyhow::Result<Self> {
        let file: Self =
            toml::from_str(text).map_err(|error| anyhow!("{}", error.to_string().trim_end()))?;
        if !file.defaults.aliases.is_empty() {
            bail!("aliases are names of one model: they belong into a table [models.NAME]");
        }
        for (name, settings) in &file.models {
            if !names.contains(&&**name) {
                bail!("[models.{name:?}]: the models here are {}", names.join(", "));
            }
            let sampling = settings.over(&file.defaults).sampling(&Sampling::default());
            if let Some(sampling) = sampling {
                sampling.validate().with_context(|| format!("[models.{name:?}]"))?;
            }
        }
        if let Some(sampling) = file.defaults.sampling(&Sampling::default()) {
            sampling.validate().context("[defaults]")?;
        }
        Ok(file)
    }

    /// Settings of a model.
    pub(crate) fn of_model(&self, name: &str) -> ModelSettings {
        match self.models.get(name) {
            Some(settings) => settings.over(&self.defaults),
            None => self.defaults.clone(),
        }
    }
}

impl ModelSettings {
    /// The settings, completed by `defaults`.
    fn over(&self, defaults: &Self) -> Self {
        Self {
            aliases: self.aliases.clone(),
            ctx: self.ctx.or(defaults.ctx),
            sessions: self.sessions.or(defaults.sessions),
            memory: self.memory.or(defaults.memory),
            gpu_memory: self.gpu_memory.or(defaults.gpu_memory),
            state_memory: self.state_memory.or(defaults.state_memory),
            prefix_memory: self.prefix_memory.or(defaults.prefix_memory),
            experts_on_host: self
                .experts_on_host
                .clone()
                .or_else(|| defaults.experts_on_host.clone()),
            kv: self.kv.or(defaults.kv),
            rope_scaling: self.rope_scaling.or(defaults.rope_scaling),
            tokenizer_pre: self.tokenizer_pre.clone().or_else(|| defaults.tokenizer_pre.clone()),
            prefix_cache: self.prefix_cache.clone().or_else(|| defaults.prefix_cache.clone()),
            prefix_cache_size: self.prefix_cache_size.or(defaults.prefix_cache_size),
            ttl: self.ttl.or(defaults.ttl),
            temperature: self.temperature.or(defaults.temperature),
            top_k: self.top_k.or(defaults.top_k),
            top_p: self.top_p.or(defaults.top_p),
            min_p: self.min_p.or(defaults.min_p),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty),
            presence_penalty: self.presence_penalty.or(defaults.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(defaults.frequency_penalty),
        }
    }

    /// Arguments for the model at `path`: the given ones, completed by these settings.
    pub(crate) fn args(&self, given: &ServeArgs, path: &Path) -> ServeArgs {
        let mut args = given.clone();
        args.models = None;
        args.engine.model.model = Some(path.to_owned());
        args.ttl = args.ttl.or(self.ttl);
        args.sessions = args.sessions.or(self.sessions);
        let memory = &mut args.engine.memory;
        memory.ctx = memory.ctx.or(self.ctx);
        memory.memory = memory.memory.or(self.memory);
        memory.gpu_memory = memory.gpu_memory.or(self.gpu_memory);
        memory.state_memory = memory.state_memory.or(self.state_memory);
        memory.prefix_memory = memory.prefix_memory.or(self.prefix_memory);
        let experts_on_host = memory.experts_on_host.take();
        memory.experts_on_host = experts_on_host.or_else(|| self.experts_on_host.clone());
        args.engine.compute.kv = args.engine.compute.kv.or(self.kv);
        let model = &mut args.engine.model;
        model.rope_scaling = model.rope_scaling.or(self.rope_scaling);
        let pre = model.tokenizer.tokenizer_pre.take();
        model.tokenizer.tokenizer_pre = pre.or_else(|| self.tokenizer_pre.clone());
        if args.cache.prefix_cache.is_none() {
            args.cache.prefix_cache = self.prefix_cache.as_deref().map(folders::below_home);
        }
        args.cache.prefix_cache_size = args.cache.prefix_cache_size.or(self.prefix_cache_size);
        args
    }

    /// Sampling of requests that do not say theirs, if a setting differs from `recommended`.
    pub(crate) fn sampling(&self, recommended: &Sampling) -> Option<Sampling> {
        let mut sampling = recommended.clone();
        let numbers = [
            (self.temperature, &mut sampling.temperature),
            (self.top_p, &mut sampling.top_p),
            (self.min_p, &mut sampling.min_p),
            (self.repetition_penalty, &mut sampling.repetition_penalty),
            (self.presence_penalty, &mut sampling.presence_penalty),
            (self.frequency_penalty, &mut sampling.frequency_penalty),
        ];
        for (number, target) in numbers {
            *target = number.unwrap_or(*target);
        }
        sampling.top_k = self.top_k.unwrap_or(sampling.top_k);
        (sampling != *recommended).then_some(sampling)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    const NAMES: [&str; 2] = ["big-model", "org/small"];

    fn args(line: &[&str]) -> ServeArgs {
        let line = ["moeflux", "serve"].iter().chain(line);
        match Cli::parse_from(line).command {
            Command::Serve(args) => args,
            _ => unreachable!("the command is serve"),
        }
    }

    #[test]
    fn options_override_a_models_settings_and_these_the_defaults() {
        let text = r#"
            [defaults]
            ctx = 4096
            sessions = 2
            temperature = 0.5
            ttl = "10m"

            [models.big-model]
            aliases = ["big", "gpt-4o"]
            ctx = 65536
            memory = "24GiB"
            prefix-memory = "2GiB"
            gpu-memory = "20GiB,10GiB"
            kv = "q8"
            rope-scaling = "yarn:4"
            tokenizer-pre = "qwen2"
            prefix-cache = "/var/cache/big"
            prefix-cache-size = "1GB"
            top-k = 20

            [models."org/small"]
            ttl = "-1"
        "#;
        let file = SettingsFile::parse(text, &NAMES).unwrap();
        let big = file.of_model("big-model");
        assert_eq!(big.aliases, ["big", "gpt-4o"]);
        let made = big.args(&args(&["--memory", "8GiB"]), Path::new("m/big-model"));
        assert_eq!(made.engine.model.model.as_deref(), Some(Path::new("m/big-model")));
        assert_eq!(made.engine.memory.memory, Some(8 << 30));
        assert_eq!(made.engine.memory.prefix_memory, Some(2 << 30));
        let none = big.args(&args(&["--prefix-memory", "0"]), Path::new("m/big-model"));
        assert_eq!(none.engine.memory.prefix_memory, Some(0));
        let cards = made.engine.memory.gpu_memory.unwrap();
        assert_eq!(cards.as_slice(), [20 << 30, 10 << 30]);
        assert_eq!(made.engine.memory.ctx.map(usize::from), Some(65536));
        assert_eq!(made.sessions.map(usize::from), Some(2));
        assert_eq!(made.engine.compute.kv, Some(KvFormat::Q8));
        assert!(made.engine.model.rope_scaling.is_some());
        assert_eq!(made.engine.model.tokenizer.tokenizer_pre.as_deref(), Some("qwen2"));
        assert_eq!(made.cache.prefix_cache.as_deref(), Some(Path::new("/var/cache/big")));
        assert_eq!(made.cache.prefix_cache_size, Some(1_000_000_000));
        let sampling = big.sampling(&Sampling::default()).unwrap();
        assert_eq!(sampling, Sampling::default().temperature(0.5).top_k(20));
        let small = file.of_model("org/small").args(&args(&[]), Path::new("s"));
        assert_eq!(small.ttl, Some(KeepAlive::Forever));
        assert_eq!(small.engine.memory.ctx.map(usize::from), Some(4096));
        let none = SettingsFile::parse("", &NAMES).unwrap().of_model("big-model");
        assert_eq!(none.sampling(&Sampling::default()), None);
    }

    #[test]
    fn wrong_settings_are_named_with_their_line() {
        for (text, words) in [
            ("[models.big-model]\nctxt = 3", &["line 2", "ctxt"][..]),
            ("[model.big-model]\nctx = 3", &["line 1", "model"]),
            ("[defaults]\n\nctx = \"3\"", &["line 3", "ctx"]),
            ("[defaults]\nctx = 0", &["line 2", "ctx"]),
            ("[defaults]\nmemory = \"much\"", &["line 2", "memory", "such as 8GiB"]),
            ("[defaults]\nkv = \"q9\"", &["line 2", "kv", "q9"]),
            ("[defaults]\nttl = \"soon\"", &["line 2", "ttl", "10m"]),
            ("[defaults]\ntop-p = 2", &["[defaults]", "top_p"]),
            ("[defaults]\naliases = [\"a\"]", &["aliases"]),
            ("[models.other]\nctx = 3", &["other", "big-model, org/small"]),
            ("ctx = 3 = 4", &["line 1"]),
        ] {
            let error = format!("{:#}", SettingsFile::parse(text, &NAMES).unwrap_err());
            for word in words {
                assert!(error.contains(word), "{text}: {word}: {error}");
            }
        }
    }
}
