//! The language model's part of a config.

use serde_json::Value;

/// Its places in a config, as JSON pointers. A model that listens and speaks has it in its thinker.
const PLACES: [&str; 2] = ["/thinker_config/text_config", "/text_config"];

fn place(config: &Value) -> &'static str {
    let is_there = |place: &&str| config.pointer(place).is_some_and(Value::is_object);
    PLACES.into_iter().find(is_there).unwrap_or("")
}

/// The part of a config that is the language model's, or the whole config.
pub fn text_config(config: &Value) -> &Value {
    config.pointer(place(config)).unwrap_or(config)
}

/// The same to edit. It always exists.
pub fn text_config_mut(config: &mut Value) -> Option<&mut Value> {
    config.pointer_mut(place(config))
}
