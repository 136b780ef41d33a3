//! RoPE scaling that a user asks for: the edit of `config.json` that model cards advise for long
//! contexts.

use std::str::FromStr;

use moeflux_base::Error;
use serde_json::{Map, Value, json};

use super::{folder::Checkpoint, text_config::text_config_mut};

/// YaRN with a factor, written `yarn:FACTOR` or `yarn:FACTOR:POSITIONS`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RopeScaling {
    /// Factor on the positions, more than 1.
    pub factor: f64,
    /// Positions that the model was trained for; `None` for those of the config.
    pub original_positions: Option<usize>,
}

/// Largest factor; model cards advise 2 to 8.
const MAX_FACTOR: f64 = 1024.0;

impl FromStr for RopeScaling {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text:?}: write yarn:FACTOR or yarn:FACTOR:POSITIONS, such as yarn:4:32768")
        };
        let mut parts = text.split(':');
        if parts.next() != Some("yarn") {
            return Err(wrong());
        }
        let factor: f64 = parts.next().and_then(|f| f.parse().ok()).ok_or_else(wrong)?;
        let original_positions = parts.next().map(str::parse).transpose().map_err(|_| wrong())?;
        if parts.next().is_some() || original_positions == Some(0) {
            return Err(wrong());
        }
        if !(factor > 1.0 && factor <= MAX_FACTOR) {
            return Err(format!("the factor {factor} is not above 1 and at most {MAX_FACTOR}"));
        }
        Ok(Self { factor, original_positions })
    }
}

/// Config keys that hold settings of RoPE, newest first.
const KEYS: [&str; 2] = ["rope_parameters", "rope_scaling"];

/// Key of the positions that a model was trained for, in these settings or beside them.
const ORIGINAL: &str = "original_max_position_embeddings";

impl Checkpoint {
    /// Scales the RoPE of the model as if `config.json` asked for it: the model has as many
    /// positions more, and another identity.
    ///
    /// # Errors
    /// The config has RoPE scaling already, RoPE by layer type, or no number of positions.
    pub fn scale_rope(&mut self, scaling: RopeScaling) -> Result<(), Error> {
        let path = self.folder.join("config.json");
        let bad = |problem: String| Error::Checkpoint { path: path.clone(), problem };
        let config = text_config_mut(&mut self.config).and_then(Value::as_object_mut);
        let config = config.ok_or_else(|| bad("this is not a JSON object".into()))?;
        let found = KEYS.iter().find_map(|key| config.get(*key)?.as_object().cloned());
        let (key, mut rope) = match found {
            Some(rope) if config.get(KEYS[0]).is_some_and(Value::is_object) => (KEYS[0], rope),
            found => (KEYS[1], found.unwrap_or_else(Map::new)),
        };
        if rope.values().any(Value::is_object) || config.contains_key("swa_rope_theta") {
            let problem = "its RoPE differs between layer types: --rope-scaling is not supported";
            return Err(bad(problem.into()));
        }
        let kind = rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str);
        if let Some(kind) = kind.filter(|kind| !["default", "mrope"].contains(kind)) {
            let problem = format!("it scales RoPE already ({kind:?}): leave --rope-scaling out");
            return Err(bad(problem));
        }
        let positions = config.get("max_position_embeddings").and_then(Value::as_u64);
        let original = match scaling.original_positions {
            Some(original) => original as u64,
            None => positions.ok_or_else(|| bad("it has no \"max_position_embeddings\"".into()))?,
        };
        rope.remove("type");
        rope.insert("rope_type".into(), json!("yarn"));
        rope.insert("factor".into(), json!(scaling.factor));
        rope.insert(ORIGINAL.into(), json!(original));
        for key in KEYS.into_iter().chain([ORIGINAL]) {
            config.remove(key);
        }
        config.insert(key.into(), Value::Object(rope));
        let scaled = (original as f64 * scaling.factor) as u64;
        config.insert("max_position_embeddings".into(), json!(scaled));
        self.rope_scaling = Some(scaling);
        Ok(())
    }

    /// Scaling of RoPE that was asked for.
    pub fn rope_scaling(&self) -> Option<RopeScaling> {
        self.rope_scaling
    }
}
