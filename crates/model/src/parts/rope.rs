//! RoPE settings of a config: `rope_theta`, `rope_scaling`, `rope_parameters` to a [`RopeShape`].

use moeflux_base::Error;
use moeflux_ops::RopePairs;
use serde::{Deserialize, Deserializer, de::Error as _};
use serde_json::Value;

use super::config::{PerLayer, Require, config_error, config_number};
use crate::{
    blueprint::{GqaShape, Llama3Scaling, LongRope, QueryTemperature, RopeShape, Yarn},
    checkpoint::source::TensorSource,
};

/// `rope_scaling` or, newer, `rope_parameters`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub(crate) struct RopeConfig {
    rope_type: Option<String>,
    /// Older name of `rope_type`; some configs have both.
    #[serde(rename = "type")]
    older_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    partial_rotary_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    attention_factor: Option<f64>,
    truncate: Option<bool>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    /// Hunyuan's constant for `dynamic` RoPE.
    alpha: Option<f64>,
    /// Divisors of the frequencies and factors on the rotated elements, of `longrope`.
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
    short_mscale: Option<f64>,
    long_mscale: Option<f64>,
    llama_4_scaling_beta: Option<f64>,
    /// Pairs that turn by time, row and column of images.
    mrope_section: Option<Vec<usize>>,
    mrope_interleaved: Option<bool>,
}

/// Key of the positions that a model was trained for.
const ORIGINAL: &str = "original_max_position_embeddings";

/// Config keys that hold RoPE settings.
#[derive(Deserialize)]
pub(crate) struct RopeKeys {
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    #[serde(default, deserialize_with = "of_all_layers")]
    rope_scaling: Option<RopeConfig>,
    #[serde(default, deserialize_with = "of_all_layers")]
    rope_parameters: Option<RopeConfig>,
}

/// Settings for all layers: a map, or a map by layer type whose entries are equal.
fn of_all_layers<'de, D: Deserializer<'de>>(source: D) -> Result<Option<RopeConfig>, D::Error> {
    let parse = |value: &Value| RopeConfig::deserialize(value).map_err(D::Error::custom);
    let value = match Value::deserialize(source)? {
        Value::Null => return Ok(None),
        value => value,
    };
    let by_type = value.as_object().map(|map| map.values().filter(|v| !v.is_null()));
    let Some(mut by_type) = by_type.filter(|all| all.clone().count() > 0) else {
        return parse(&value).map(Some);
    };
    if !by_type.clone().all(Value::is_object) {
        return parse(&value).map(Some);
    }
    let first = by_type.next().map(parse).transpose()?;
    for other in by_type {
        if Some(parse(other)?) != first {
            return Err(D::Error::custom(
                "the settings of RoPE differ between layer types, which is not supported for this \
                 architecture",
            ));
        }
    }
    Ok(first)
}

/// `rope_parameters` of a model with settings for each type of layer.
#[derive(Default, Deserialize)]
pub(crate) struct RopeByType {
    full_attention: Option<RopeConfig>,
    sliding_attention: Option<RopeConfig>,
}

impl RopeByType {
    /// Settings of layers with this window.
    pub(crate) fn of(&self, window: Option<usize>) -> RopeConfig {
        let found = match window {
            Some(_) => &self.sliding_attention,
            None => &self.full_attention,
        };
        found.clone().unwrap_or_default()
    }
}

/// Config keys of RoPE with a list by layer, and scaling of some types of layers.
#[derive(Deserialize)]
pub(crate) struct RopeLists {
    rope_theta: Option<PerLayer<f64>>,
    partial_rotary_factors: Option<Vec<f64>>,
    rope_scaling: Option<RopeConfig>,
    /// Types of layers that `rope_scaling` is for; `None` for all.
    yarn_only_types: Option<Vec<String>>,
    /// By type of layer, instead of the keys above.
    rope_parameters: Option<RopeByType>,
}

impl RopeLists {
    /// RoPE of layer `layer`, whose attention has this shape.
    pub(crate) fn of(
        &self,
        source: &dyn TensorSource,
        layer: usize,
        shape: &GqaShape,
    ) -> Result<RopeShape, Error> {
        if let Some(by_type) = &self.rope_parameters {
            let rotated = RotatedPart { dims: None, default_share: 1.0 };
            return by_type.of(shape.window).partial(source, shape.head_dim, rotated);
        }
        let kind = if shape.window.is_some() { "sliding_attention" } else { "full_attention" };
        let is_scaled = |types: &Vec<String>| types.iter().any(|name| name == kind);
        let is_scaled = self.yarn_only_types.as_ref().is_none_or(is_scaled);
        let scaling = self.rope_scaling.clone().filter(|_| is_scaled).unwrap_or_default();
        let theta = self.rope_theta.as_ref().map(|theta| theta.of(source, "rope_theta", layer));
        let shares = self.partial_rotary_factors.as_ref();
        Require(source).layers("partial_rotary_factors", shares, layer + 1)?;
        let rotated = RotatedPart { dims: None, default_share: shares.map_or(1.0, |s| s[layer]) };
        let config = scaling.with_theta(theta.transpose()?);
        config.partial(source, shape.head_dim, rotated)
    }
}

/// Elements of each head that RoPE rotates.
#[derive(Clone, Copy)]
pub(crate) enum RopeStyle {
    /// All, in these pairs.
    Whole(RopePairs),
    /// The first ones, by halves.
    Partial(RotatedPart),
    /// None: a layer without positions (NoPE).
    Nope,
}

impl RopeStyle {
    /// RoPE on whole heads or, in models that have it in some layers only, NoPE.
    pub(crate) const fn whole_if(has_positions: bool, pairs: RopePairs) -> Self {
        if has_positions { Self::Whole(pairs) } else { Self::Nope }
    }
}

/// Part of each head that RoPE rotates.
#[derive(Clone, Copy)]
pub(crate) struct RotatedPart {
    /// Rotated elements, where the config names a number.
    pub(crate) dims: Option<usize>,
    /// Rotated share of the head, where the config has neither a number nor a share.
    pub(crate) default_share: f64,
}

impl RopeKeys {
    /// The settings from either map. If both exist, they must agree.
    pub(crate) fn config(&self, source: &dyn TensorSource) -> Result<RopeConfig, Error> {
        if let (Some(new), Some(old)) = (&self.rope_parameters, &self.rope_scaling) {
            Require(source).that(new.kind() == old.kind() && new.factor == old.factor, || {
                "\"rope_parameters\" and \"rope_scaling\" differ: keep one of them".into()
            })?;
        }
        let found = self
            .rope_parameters
            .as_ref()
            .or(self.rope_scaling.as_ref())
            .cloned()
            .unwrap_or_default();
        Ok(RopeConfig {
            rope_theta: found.rope_theta.or(self.rope_theta),
            partial_rotary_factor: found.partial_rotary_factor.or(self.partial_rotary_factor),
            // As in transformers, the key of the whole config counts first.
            original_max_position_embeddings: config_number(source, ORIGINAL)
                .or(found.original_max_position_embeddings),
            ..found
        })
    }

    /// RoPE of heads of `head_dim` elements. Without positions the keys are not read.
    pub(crate) fn of(
        &self,
        source: &dyn TensorSource,
        head_dim: usize,
        style: RopeStyle,
    ) -> Result<RopeShape, Error> {
        match style {
            RopeStyle::Whole(pairs) => self.config(source)?.whole(source, head_dim, pairs),
            RopeStyle::Partial(part) => self.config(source)?.partial(source, head_dim, part),
            RopeStyle::Nope => Ok(RopeShape::NONE),
        }
    }
}

/// Attention temperature of YaRN: `0.1 mscale ln(factor) + 1`. Peng et al., "YaRN", 2023, section
/// 3.4.
fn attention_temperature(factor: f64, mscale: f64) -> f64 {
    if factor > 1.0 { 0.1 * mscale * factor.ln() + 1.0 } else { 1.0 }
}

impl RopeConfig {
    /// The settings, with this `rope_theta` where they have none.
    pub(crate) fn with_theta(self, theta: Option<f64>) -> Self {
        Self { rope_theta: self.rope_theta.or(theta), ..self }
    }

    /// `rope_type`, in the spelling of transformers.
    fn kind(&self) -> &str {
        match self.rope_type.as_deref().or(self.older_type.as_deref()) {
            // Positions of images differ from those of text; those of text are plain RoPE.
            None | Some("mrope") => "default",
            Some("deepseek_yarn") => "yarn",
            Some(kind) => kind,
        }
    }

    /// Share of each head that is rotated, if the config sets it.
    pub(crate) fn share(&self, source: &dyn TensorSource) -> Result<Option<f64>, Error> {
        let share = self.partial_rotary_factor;
        Require(source).that(share.is_none_or(|share| share > 0.0 && share <= 1.0), || {
            format!(
                "\"partial_rotary_factor\" is {}: a share above 0, at most 1, is needed",
                share.unwrap_or(0.0)
            )
        })?;
        Ok(share)
    }

    /// RoPE on a part of heads of `head_dim` elements.
    pub(crate) fn partial(
        &self,
        source: &dyn TensorSource,
        head_dim: usize,
        rotated: RotatedPart,
    ) -> Result<RopeShape, Error> {
        let share = self.share(source)?.unwrap_or(rotated.default_share);
        let dims = rotated.dims.unwrap_or((head_dim as f64 * share) as usize);
        Require(source).that((1..=head_dim).contains(&dims), || {
            format!(
                "\"rotary_dim\" or \"partial_rotary_factor\" rotates {dims} of {head_dim} \
                 elements of a head"
            )
        })?;
        self.shape(source, dims, RopePairs::Halves)
    }

    /// RoPE on all `dims` elements of each head.
    pub(crate) fn whole(
        &self,
        source: &dyn TensorSource,
        dims: usize,
        pairs: RopePairs,
    ) -> Result<RopeShape, Error> {
        Require(source).that(self.share(source)?.is_none_or(|share| share == 1.0), || {
            "\"partial_rotary_factor\" is not 1: this architecture rotates whole heads".into()
        })?;
        self.shape(source, dims, pairs)
    }

    /// RoPE on `dims` elements of each head, whatever share of a head these are.
    ///
    /// # Errors
    /// A key is missing or its value invalid, or the type is unknown.
    pub(crate) fn shape(
        &self,
        source: &dyn TensorSource,
        dims: usize,
        pairs: RopePairs,
    ) -> Result<RopeShape, Error> {
        let (require, kind) = (Require(source), self.kind());
        // Scores do not depend on the order of elements.
        let pairs = match source.changes().pairs_adjacent {
            true => RopePairs::Interleaved,
            false => pairs,
        };
        let needed = |name: &str, number: Option<f64>| {
            number.ok_or_else(|| {
                config_error(source, format!("it has no \"{name}\" for RoPE of type {kind:?}"))
            })
        };
        let theta = needed("rope_theta", self.rope_theta)?;
        require
            .that(theta > 1.0, || format!("\"rope_theta\" is {theta}: more than 1 is needed"))?;
        require.that(dims.is_multiple_of(2), || {
            format!("{dims} elements of \"head_dim\" are rotated: RoPE needs pairs")
        })?;
        let factor = match kind {
            "linear" | "yarn" | "llama3" => needed("factor", self.factor)?,
            _ => self.factor.unwrap_or(1.0),
        };
        require.that(factor > 0.0, || format!("the \"factor\" of RoPE is {factor}"))?;
        let rope = match kind {
            "default" => RopeShape::new(dims, theta, pairs),
            "linear" => RopeShape::interpolated(dims, theta, factor, pairs),
            // The base is scaled once, for all positions: bloc97, "NTK-Aware Scaled RoPE", 2023.
            // Without alpha it is scaled beyond the model's positions only, where no session is.
            "dynamic" => match self.alpha.filter(|alpha| *alpha != 0.0) {
                Some(alpha) if dims > 2 => {
                    let base = theta * alpha.powf(dims as f64 / (dims as f64 - 2.0));
                    RopeShape::new(dims, base, pairs)
                }
                _ => RopeShape::new(dims, theta, pairs),
            },
            "proportional" => {
                // Frequencies are those of the whole head; pairs after the rotated part get 0.
                let rotated = (dims as f64 * self.share(source)?.unwrap_or(1.0)) as usize / 2;
                let mut rope = RopeShape::interpolated(dims, theta, factor, pairs);
                rope.frequencies.iter_mut().skip(rotated).for_each(|f| *f = 0.0);
                rope
            }
            "longrope" => self.long_rope(source, RopeShape::new(dims, theta, pairs))?,
            "yarn" => {
                let yarn = Yarn {
                    factor,
                    original_positions: self.original_positions(source)?,
                    beta_fast: self.beta_fast.unwrap_or(32.0),
                    beta_slow: self.beta_slow.unwrap_or(1.0),
                    truncate: self.truncate.unwrap_or(true),
                    scale: self.attention_factor.unwrap_or(
                        attention_temperature(factor, self.mscale.unwrap_or(1.0))
                            / attention_temperature(factor, self.mscale_all_dim.unwrap_or(0.0)),
                    ) as f32,
                };
                for (name, number) in [
                    (ORIGINAL, yarn.original_positions),
                    ("beta_fast", yarn.beta_fast),
                    ("beta_slow", yarn.beta_slow),
                ] {
                    require.that(number > 0.0, || {
                        format!("\"{name}\" of YaRN is {number}: more than zero is needed")
                    })?;
                }
                RopeShape::yarn(dims, theta, &yarn, pairs)
            }
            "llama3" => {
                let scaling = Llama3Scaling {
                    factor,
                    original_positions: self.original_positions(source)?,
                    low_turns: needed("low_freq_factor", self.low_freq_factor)?,
                    high_turns: needed("high_freq_factor", self.high_freq_factor)?,
                };
                require.that(scaling.high_turns > scaling.low_turns, || {
                    "\"high_freq_factor\" of RoPE is not above \"low_freq_factor\"".into()
                })?;
                RopeShape::llama3(dims, theta, &scaling, pairs)
            }
            other => {
                return Err(config_error(
                    source,
                    format!("the rope type {other:?} is not supported"),
                ));
            }
        };
        let axes = self.axes(source, rope.frequencies.len())?;
        let long = rope.long.iter().flat_map(|long| long.frequencies.iter().chain([&long.scale]));
        let values = rope.frequencies.iter().chain([&rope.scale]).chain(long);
        require.that(values.copied().all(f32::is_finite), || {
            format!(
                "RoPE of type {kind:?} with \"rope_theta\" {theta} and \"factor\" {factor} has \
                 values that are not finite"
            )
        })?;
        Ok(RopeShape { axes, ..rope })
    }

    /// Axis of each of `pairs` pairs; empty without sections. Bai et al., "Qwen2.5-VL", 2025, has
    /// consecutive sections, "Qwen3-VL", 2025, interleaved ones.
    ///
    /// As in transformers, the two families of Qwen have sections by default, and interleave them
    /// whatever the config says.
    fn axes(&self, source: &dyn TensorSource, pairs: usize) -> Result<Vec<u8>, Error> {
        let of_family = match source.config().get("model_type").and_then(Value::as_str) {
            Some("qwen3_vl_moe") => Some([24, 20, 20]),
            Some("qwen3_5_moe") => Some([11, 11, 10]),
            _ => None,
        };
        let is_interleaved = of_family.is_some() || self.mrope_interleaved.unwrap_or(false);
        let default = of_family.as_ref().map(<[usize; 3]>::as_slice);
        let Some(sections) = self.mrope_section.as_deref().or(default) else {
            return Ok(Vec::new());
        };
        let &[time, rows, columns] = sections else {
            let problem = format!("\"mrope_section\": expected three sections, got {sections:?}");
            return Err(config_error(source, problem));
        };
        // Sections may have more pairs than are rotated, as in transformers.
        let axis = |pair: usize| match is_interleaved {
            true if pair % 3 == 1 && pair / 3 < rows => 1,
            true if pair % 3 == 2 && pair / 3 < columns => 2,
            true => 0,
            false => u8::from(pair >= time) + u8::from(pair >= time.saturating_add(rows)),
        };
        Ok((0..pairs).map(axis).collect())
    }

    /// LongRoPE of the frequencies of `rope`.
    fn long_rope(&self, source: &dyn TensorSource, rope: RopeShape) -> Result<RopeShape, Error> {
        let of = |key: &str, factors: Option<&Vec<f64>>| {
            let factors = factors.filter(|factors| factors.len() == rope.frequencies.len());
            let divided = |factors: &Vec<f64>| {
                let each = rope.frequencies.iter().zip(factors);
                each.map(|(frequency, factor)| (f64::from(*frequency) / factor) as f32).collect()
            };
            factors.map(divided).ok_or_else(|| {
                let pairs = rope.frequencies.len();
                let problem = format!("\"{key}\" of RoPE of type longrope needs {pairs} numbers");
                config_error(source, problem)
            })
        };
        let original = self.original_positions(source)?;
        let positions = original as usize;
        Require(source).sizes(&[(ORIGINAL, positions)])?;
        let extended = config_number(source, "max_position_embeddings").unwrap_or(original);
        let factor = self.factor.unwrap_or(extended / original);
        let scale = match self.attention_factor {
            Some(scale) => scale,
            None if factor <= 1.0 => 1.0,
            // Ding et al., "LongRoPE", 2024, as microsoft/LongRoPE computes it.
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        Ok(RopeShape {
            frequencies: of("short_factor", self.short_factor.as_ref())?,
            scale: self.short_mscale.unwrap_or(scale) as f32,
            long: Some(LongRope {
                original_positions: positions,
                frequencies: of("long_factor", self.long_factor.as_ref())?,
                scale: self.long_mscale.unwrap_or(scale) as f32,
            }),
            ..rope
        })
    }

    /// Positions that the model was trained for: all of them where the config does not say, as in
    /// transformers.
    fn original_positions(&self, source: &dyn TensorSource) -> Result<f64, Error> {
        let positions = self
            .original_max_position_embeddings
            .or_else(|| config_number(source, "max_position_embeddings"));
        Require(source).named(ORIGINAL, positions, "the scaling of RoPE")
    }

    /// Factor on the queries by position, if the config sets it.
    pub(crate) fn temperature(
        &self,
        source: &dyn TensorSource,
    ) -> Result<Option<QueryTemperature>, Error> {
        let Some(beta) = self.llama_4_scaling_beta else { return Ok(None) };
        let period = self.original_positions(source)? as usize;
        Require(source).sizes(&[(ORIGINAL, period)])?;
        Require(source).that(beta.is_finite(), || format!("\"llama_4_scaling_beta\" is {beta}"))?;
        Ok(Some(QueryTemperature { beta, period }))
    }

    /// Factor on the softmax scale of latent attention: YaRN's temperature squared, as
    /// `mscale_all_dim` applies it to all elements instead of the rotated ones. DeepSeek-AI,
    /// DeepSeek-V3, inference/model.py, `MLA`.
    pub(crate) fn score_factor(&self) -> f32 {
        match (self.kind(), self.mscale_all_dim) {
            ("yarn", Some(mscale)) if mscale != 0.0 => {
                attention_temperature(self.factor.unwrap_or(1.0), mscale).powi(2) as f32
            }
            _ => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::checkpoint::{recorder::Recorder, source::SourceChanges};

    /// RoPE on 16 elements of a model with 4,096 positions, with these changes to its config.
    fn shape(changes: Value) -> Result<RopeShape, Error> {
        let mut config = json!({"rope_theta": 10000.0, "max_position_embeddings": 4096});
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let keys = RopeKeys::deserialize(&config).unwrap();
        let (changes, has) = (SourceChanges::default(), |_: &str| false);
        let style = RopeStyle::Whole(RopePairs::Halves);
        keys.of(&Recorder::new(&config, changes, &has), 16, style)
    }

    fn assert_near(values: &[f32], expected: &[f32]) {
        assert_eq!(values.len(), expected.len());
        for (value, expected) in values.iter().zip(expected) {
            assert!((value - expected).abs() <= 1e-6 * expected, "{values:?} {expected}");
        }
    }

    /// Expected numbers were computed by `ROPE_INIT_FUNCTIONS` of transformers 5.24, with numpy in
    /// place of torch.
    #[test]
    #[allow(clippy::excessive_precision, reason = "numbers as numpy prints them")]
    fn keys_that_a_config_leaves_out_are_those_of_transformers() {
        let plain = [1.0, 0.31622776, 0.1, 0.03162278, 0.01, 0.0031622779, 0.001, 0.00031622779];
        let yarn_1024 = [
            1.0,
            0.31622776,
            0.081250004,
            0.019764237,
            0.004375,
            0.00079056947,
            0.00025,
            7.9056947e-5,
        ];
        let yarn =
            |original: Value| json!({"rope_type": "yarn", "factor": 4.0, ORIGINAL: original});
        let llama3 = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0
        });
        for (changes, frequencies, scale) in [
            (
                json!({"rope_scaling": yarn(Value::Null)}),
                [
                    1.0,
                    0.31622776,
                    0.1,
                    0.025693506,
                    0.0062499996,
                    0.0013834966,
                    0.00025,
                    7.9056947e-5,
                ],
                1.1386294,
            ),
            (json!({"rope_scaling": yarn(json!(1024))}), yarn_1024, 1.1386294),
            (json!({"rope_scaling": yarn(Value::Null), ORIGINAL: 1024}), yarn_1024, 1.1386294),
            (json!({"rope_scaling": yarn(json!(512)), ORIGINAL: 1024}), yarn_1024, 1.1386294),
            (
                json!({"rope_parameters": llama3}),
                [1.0, 0.31622776, 0.1, 0.03162278, 0.01, 0.0013743249, 0.000125, 3.9528473e-5],
                1.0,
            ),
            (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), plain, 1.0),
            (json!({"rope_scaling": {"type": "dynamic"}}), plain, 1.0),
            (json!({"rope_scaling": {"type": "dynamic", "alpha": 0, "factor": 2}}), plain, 1.0),
        ] {
            let rope = shape(changes).unwrap();
            assert!(rope.long.is_none());
            assert_near(&rope.frequencies, &frequencies);
            assert_near(&[rope.scale], &[scale]);
        }
        let scaled = shape(json!({"rope_scaling": {"type": "dynamic", "alpha": 1000.0}})).unwrap();
        let base = shape(json!({"rope_theta": 10000.0 * 1000f64.powf(16.0 / 14.0)})).unwrap();
        assert_eq!(scaled.frequencies, base.frequencies);
    }

    /// As the test above.
    #[test]
    fn long_rope_without_scales_has_those_of_transformers() {
        let short: Vec<f64> = (0..8).map(|i| 1.0 + f64::from(i) / 8.0).collect();
        let long: Vec<f64> = (0..8).map(|i| 1.0 + f64::from(i)).collect();
        let short_frequencies = [
            1.0,
            0.28109136,
            0.08,
            0.022998383,
            0.006666667,
            0.001946017,
            0.00057142857,
            0.0001686548,
        ];
        let long_frequencies = [
            1.0,
            0.15811388,
            0.033333335,
            0.007905695,
            0.002,
            0.0005270463,
            0.00014285714,
            3.9528473e-5,
        ];
        for (keys, positions, scale) in [
            (json!({ORIGINAL: 1024}), 1024, 1.0954451),
            (json!({}), 4096, 1.0),
            (json!({"factor": 16.0}), 4096, 1.1547005),
            (json!({"factor": 16.0, "attention_factor": 1.5}), 4096, 1.5),
        ] {
            let mut scaling =
                json!({"rope_type": "longrope", "short_factor": short, "long_factor": long});
            scaling.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
            let rope = shape(json!({"rope_scaling": scaling})).unwrap();
            assert_near(&rope.frequencies, &short_frequencies);
            let long = rope.long.unwrap();
            assert_eq!(long.original_positions, positions);
            assert_near(&long.frequencies, &long_frequencies);
            assert_near(&[rope.scale, long.scale], &[scale, scale]);
        }
    }
}
