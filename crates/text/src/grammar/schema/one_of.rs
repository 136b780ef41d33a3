//! `oneOf`: alternatives of which exactly one holds.

use std::rc::Rc;

use moeflux_base::GrammarError;
use serde_json::Value;

use super::{
    branch::{Condition, Goal, SchemaBranch, is_equal, type_of, types},
    expand::{Expander, OpenPart},
};

/// Most schemas of a `oneOf` that are compared with each other.
const MAX_COMPARED: usize = 1000;

/// Deepest properties that tell alternatives apart.
const MAX_DEPTH: usize = 4;

/// Properties of a schema that have one of a few values.
type Tags<'a> = Vec<(&'a str, Rc<[&'a Value]>)>;

impl<'a> Expander<'a> {
    /// Exactly one of the schemas of a part. If two exclude each other, they are alternatives;
    /// otherwise the negation of the other one is added.
    pub(super) fn one_of(
        &mut self,
        part: &OpenPart<'a>,
    ) -> Result<Vec<SchemaBranch<'a>>, GrammarError> {
        let list = self.list(part, "oneOf")?;
        let blame = part.at("oneOf");
        if list.len() > MAX_COMPARED {
            return Err(self.refused(blame, "it has too many schemas"));
        }
        let mut tags = Vec::new();
        for condition in &list {
            tags.push(self.tags(*condition)?);
        }
        let mut all = Vec::new();
        for (index, condition) in list.iter().enumerate() {
            let mut goal = vec![*condition];
            for (other, more) in list.iter().enumerate() {
                if other != index
                    && !tell_apart(&tags[index], &tags[other])
                    && !self.is_never(&[*condition, *more], 0)?
                {
                    goal.push(Condition { holds: false, blame: Some(blame), ..*more });
                }
            }
            all.extend(self.every(part, &goal)?);
        }
        Ok(all)
    }

    /// Required properties with few values.
    fn tags(&mut self, condition: Condition) -> Result<Tags<'a>, GrammarError> {
        let branches = self.condition(condition, false)?;
        let [branch] = &*branches else { return Ok(Vec::new()) };
        let Some(shape) = branch.object.as_ref().filter(|_| branch.types == types::OBJECT) else {
            return Ok(Vec::new());
        };
        let mut tags = Vec::new();
        for name in &shape.required {
            for goal in shape.layers.iter().filter_map(|layer| layer.named(name)) {
                if let [SchemaBranch { values: Some(values), .. }] = &*self.branches(goal)? {
                    tags.push((*name, Rc::clone(values)));
                }
            }
        }
        Ok(tags)
    }

    /// Whether surely nothing satisfies a goal.
    fn is_never(&mut self, goal: &[Condition], depth: usize) -> Result<bool, GrammarError> {
        for branch in self.branches(goal)?.iter() {
            if !self.is_empty(branch, depth)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether a branch surely allows nothing.
    fn is_empty(&mut self, branch: &SchemaBranch<'a>, depth: usize) -> Result<bool, GrammarError> {
        if depth > MAX_DEPTH {
            return Ok(false);
        }
        if let Some(values) = &branch.values {
            let string = branch.string.as_deref();
            let is_excluded = |value: &Value| {
                let text = value.as_str();
                string.is_some_and(|s| text.is_some_and(|text| s.excluded.contains(&text)))
            };
            let mut values = values.iter();
            return Ok(values.all(|v| type_of(v) & branch.types == 0 || is_excluded(v)));
        }
        let mut types = branch.types;
        if let Some(shape) = branch.object.as_ref().filter(|_| types & types::OBJECT != 0) {
            for name in &shape.required {
                let goals = shape.layers.iter().filter_map(|layer| {
                    let rest = layer.rest.as_ref().filter(|_| layer.patterns.is_empty());
                    layer.named(name).or(rest).cloned()
                });
                let goal = Self::all(&goals.collect::<Vec<Goal>>());
                if !goal.is_empty() && self.is_never(&goal, depth + 1)? {
                    types &= !types::OBJECT;
                    break;
                }
            }
        }
        if let Some(shape) = branch.array.as_ref().filter(|_| types & types::ARRAY != 0) {
            let shortest = usize::try_from(shape.shortest).unwrap_or(usize::MAX).min(16);
            for index in 0..shortest {
                let goals = shape
                    .layers
                    .iter()
                    .filter_map(|layer| layer.first.get(index).or(layer.rest.as_ref()).cloned());
                let goal = Self::all(&goals.collect::<Vec<Goal>>());
                if !goal.is_empty() && self.is_never(&goal, depth + 1)? {
                    types &= !types::ARRAY;
                    break;
                }
            }
        }
        Ok(types == 0)
    }
}

/// Whether a property has other values in both.
fn tell_apart(own: &Tags<'_>, other: &Tags<'_>) -> bool {
    own.iter().any(|(name, values)| {
        let mut same = other.iter().filter(|(others, _)| others == name);
        same.any(|(_, others)| {
            !values.iter().any(|value| others.iter().any(|v| is_equal(value, v)))
        })
    })
}
