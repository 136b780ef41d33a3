//! Keywords of numbers, sizes, properties and items as alternatives, and their negations.

use std::rc::Rc;

use moeflux_base::GrammarError;
use serde_json::Value;

use super::{
    branch::{
        ArrayLayer, ArrayShape, Evaluated, Goal, ItemCount, NumberLimit, NumberShape, ObjectLayer,
        ObjectShape, SchemaBranch, SomeProperty, StringShape, types,
    },
    document::SchemaDraft,
    expand::{Expanded, Expander, OpenPart},
};

impl<'a> Expander<'a> {
    pub(super) fn limit(
        &mut self,
        part: &OpenPart<'a>,
        group: &str,
        value: &'a Value,
        holds: bool,
    ) -> Result<Option<Vec<SchemaBranch<'a>>>, GrammarError> {
        let (is_least, keyword, exclusive) = match group {
            "minimum" => (true, "minimum", "exclusiveMinimum"),
            "maximum" => (false, "maximum", "exclusiveMaximum"),
            "exclusiveMinimum" => (true, "exclusiveMinimum", ""),
            _ => (false, "exclusiveMaximum", ""),
        };
        // In draft 4 it is a flag of the other keyword.
        if exclusive.is_empty() && value.is_boolean() {
            return Ok(None);
        }
        let is_flagged = part.map.get(exclusive) == Some(&Value::Bool(true));
        let number = value.as_number().filter(|number| number.as_f64().is_some());
        let number = number.ok_or_else(|| self.wrong(part, keyword, "a number"))?.clone();
        let is_exclusive = exclusive.is_empty() || is_flagged;
        let limit = Some(NumberLimit { number, is_exclusive: is_exclusive == holds });
        let mut shape = NumberShape::default();
        if is_least == holds {
            shape.least = limit;
        } else {
            shape.most = limit;
        }
        let mask = if holds { types::ALL } else { types::NUMBER };
        Ok(Some(vec![SchemaBranch::number(mask, shape)]))
    }

    pub(super) fn size(
        &mut self,
        part: &OpenPart<'a>,
        group: &str,
        value: &'a Value,
        holds: bool,
    ) -> Expanded<'a> {
        let size =
            whole(value).ok_or_else(|| self.wrong(part, group, "a whole number, not negative"))?;
        let is_least = group.starts_with("min");
        // The negation is a limit of the other kind.
        let (least, most) = match (is_least, holds) {
            (true, true) => (size, None),
            (false, true) => (0, Some(size)),
            (true, false) => match size.checked_sub(1) {
                Some(most) => (0, Some(most)),
                None => return Ok(Vec::new()),
            },
            (false, false) => (size.saturating_add(1), None),
        };
        let mask = |own| if holds { types::ALL } else { own };
        Ok(vec![match &group[3..] {
            "Length" => {
                let shape =
                    StringShape { shortest: least, longest: most, ..StringShape::default() };
                SchemaBranch::string(mask(types::STRING), shape)
            }
            "Items" => {
                let shape = ArrayShape { shortest: least, longest: most, ..ArrayShape::default() };
                SchemaBranch::array(mask(types::ARRAY), shape)
            }
            _ => {
                let shape = ObjectShape { fewest: least, most, ..ObjectShape::default() };
                SchemaBranch::object(mask(types::OBJECT), shape)
            }
        }])
    }

    /// `properties`, `patternProperties` and `additionalProperties`.
    pub(super) fn properties(&mut self, part: &OpenPart<'a>, holds: bool) -> Expanded<'a> {
        let mut lists = [Vec::new(), Vec::new()];
        for (list, keyword) in lists.iter_mut().zip(["properties", "patternProperties"]) {
            let Some(value) = part.map.get(keyword) else { continue };
            let map = value.as_object();
            let map = map.ok_or_else(|| self.wrong(part, keyword, "an object of schemas"))?;
            for (name, value) in map {
                list.push((name.as_str(), self.child(part, keyword, value, true)));
            }
        }
        let [named, patterned] = lists;
        let rest = part.map.get("additionalProperties");
        let rest = rest.map(|value| self.child(part, "additionalProperties", value, true));
        let mut names = Vec::new();
        for (name, condition) in &named {
            names.push((*name, self.goal(*condition)?));
        }
        let mut layer = ObjectLayer::new(names);
        for (pattern, condition) in &patterned {
            layer.patterns.push((*pattern, self.goal(*condition)?));
        }
        layer.rest = rest.map(|rest| self.goal(rest)).transpose()?.filter(|goal| !goal.is_empty());
        layer.is_list = holds && !named.is_empty();
        if holds {
            let evaluated = part.tracks.then(|| Evaluated {
                names: named.iter().map(|(name, _)| *name).collect(),
                patterns: patterned.iter().map(|(pattern, _)| *pattern).collect(),
                has_all_names: rest.is_some(),
                ..Evaluated::default()
            });
            let shape = ObjectShape {
                says_others: rest.is_some() || !patterned.is_empty(),
                layers: vec![Rc::new(layer)],
                ..ObjectShape::default()
            };
            let branch = SchemaBranch::object(types::ALL, shape);
            return Ok(vec![SchemaBranch { evaluated: evaluated.map(Rc::new), ..branch }]);
        }
        let mut all = Vec::new();
        for (name, condition) in named {
            let goal = self.goal(Self::negated(part, "properties", condition))?;
            all.push(SchemaBranch::object(types::OBJECT, ObjectShape::property(name, goal)));
        }
        let layer = Rc::new(layer);
        let patterned = patterned.into_iter().map(|(pattern, c)| (Some(pattern), c));
        for (pattern, condition) in patterned.chain(rest.map(|rest| (None, rest))) {
            let keyword =
                if pattern.is_some() { "patternProperties" } else { "additionalProperties" };
            let value = Self::negated(part, keyword, condition);
            if self.branches(&[value])?.is_empty() {
                continue;
            }
            let is_any = pattern.is_none() && layer.names.is_empty() && layer.patterns.is_empty();
            let is_any = is_any && self.goal(value)?.is_empty();
            let mut shape = ObjectShape { fewest: u64::from(is_any), ..ObjectShape::default() };
            if !is_any {
                let (layer, blame) = (Rc::clone(&layer), part.at(keyword));
                shape.some.push(SomeProperty { pattern, layer, value, blame });
            }
            all.push(SchemaBranch::object(types::OBJECT, shape));
        }
        Ok(all)
    }

    pub(super) fn names(
        &mut self,
        part: &OpenPart<'a>,
        value: &'a Value,
        holds: bool,
    ) -> Expanded<'a> {
        let condition = self.child(part, "propertyNames", value, true);
        let blame = part.at("propertyNames");
        let goal = self.goal(condition)?;
        let mut shape = ObjectShape::default();
        match (goal.is_empty(), self.branches(&goal)?.is_empty(), holds) {
            (true, ..) if holds => return Ok(vec![SchemaBranch::of(types::ALL)]),
            (true, ..) => return Ok(Vec::new()),
            (_, true, true) => shape.most = Some(0),
            (_, true, false) => shape.fewest = 1,
            (_, _, true) => shape.names.push((condition, blame)),
            (_, _, false) => shape.problem = Some((blame, "its negation has no form")),
        }
        let mask = if holds { types::ALL } else { types::OBJECT };
        Ok(vec![SchemaBranch::object(mask, shape)])
    }

    /// `prefixItems`, `items` and `additionalItems`.
    pub(super) fn items(&mut self, part: &OpenPart<'a>, holds: bool) -> Expanded<'a> {
        let [items, prefix, additional] =
            ["items", "prefixItems", "additionalItems"].map(|keyword| part.map.get(keyword));
        let is_old = self.document.draft(part.node) < SchemaDraft::V2020;
        // Earlier drafts have the first items as a list.
        let (first, rest, keyword) = match items {
            Some(Value::Array(list)) => (Some(list), additional, "additionalItems"),
            _ if is_old => (None, items, "items"),
            _ => {
                let list = prefix.map(|value| {
                    let wrong = || self.wrong(part, "prefixItems", "a list of schemas");
                    value.as_array().ok_or_else(wrong)
                });
                (list.transpose()?, items, "items")
            }
        };
        let step = if matches!(items, Some(Value::Array(_))) { "items" } else { "prefixItems" };
        let first = first.into_iter().flatten();
        let first: Vec<_> = first.map(|value| self.child(part, step, value, true)).collect();
        let rest = rest.map(|value| self.child(part, keyword, value, true));
        if holds {
            let evaluated = part.tracks.then(|| Evaluated {
                items: first.len(),
                has_all_items: rest.is_some(),
                ..Evaluated::default()
            });
            let mut layer = ArrayLayer::default();
            for condition in first {
                layer.first.push(self.goal(condition)?);
            }
            layer.rest = rest.map(|rest| self.goal(rest)).transpose()?;
            let shape = ArrayShape { layers: vec![layer], ..ArrayShape::default() };
            let branch = SchemaBranch::array(types::ALL, shape);
            return Ok(vec![SchemaBranch { evaluated: evaluated.map(Rc::new), ..branch }]);
        }
        let mut all = Vec::new();
        for (index, condition) in first.iter().enumerate() {
            let mut goals: Vec<Goal> = (0..index).map(|_| Goal::default()).collect();
            goals.push(self.goal(Self::negated(part, "items", *condition))?);
            let shape = ArrayShape {
                shortest: index as u64 + 1,
                layers: vec![ArrayLayer { first: goals, rest: None }],
                ..ArrayShape::default()
            };
            all.push(SchemaBranch::array(types::ARRAY, shape));
        }
        if let Some(rest) = rest {
            let item = Self::negated(part, "items", rest);
            let (from, blame) = (first.len(), part.at("items"));
            let mut shape = ArrayShape::default();
            if self.goal(item)?.is_empty() {
                shape.shortest = from as u64 + 1;
            } else {
                shape.counts.push(ItemCount { from, item, least: 1, most: None, blame });
            }
            all.push(SchemaBranch::array(types::ARRAY, shape));
        }
        Ok(all)
    }

    pub(super) fn contains(
        &mut self,
        part: &OpenPart<'a>,
        value: &'a Value,
        holds: bool,
    ) -> Expanded<'a> {
        let count = |expander: &Self, keyword: &str| match part.map.get(keyword) {
            Some(value) => {
                let wrong = || expander.wrong(part, keyword, "a whole number, not negative");
                whole(value).ok_or_else(wrong).map(Some)
            }
            None => Ok(None),
        };
        let least = count(self, "minContains")?.unwrap_or(1);
        let most = count(self, "maxContains")?;
        let item = self.child(part, "contains", value, true);
        let blame = part.at("contains");
        let evaluated = part.tracks.then(|| {
            let has_some_items = self.document.draft(part.node) >= SchemaDraft::V2020;
            Rc::new(Evaluated { has_some_items, ..Evaluated::default() })
        });
        let mut ranges = Vec::new();
        match holds {
            true => ranges.push((least, most)),
            false => {
                ranges.extend(least.checked_sub(1).map(|fewer| (0, Some(fewer))));
                ranges.extend(most.map(|most| (most.saturating_add(1), None)));
            }
        }
        let is_any = self.goal(item)?.is_empty();
        let shapes = ranges.into_iter().map(|(least, most)| match is_any {
            // All items count.
            true => ArrayShape { shortest: least, longest: most, ..ArrayShape::default() },
            false => {
                let counts = vec![ItemCount { from: 0, item, least, most, blame }];
                ArrayShape { counts, ..ArrayShape::default() }
            }
        });
        let mask = if holds { types::ALL } else { types::ARRAY };
        let branch = |shape| SchemaBranch {
            evaluated: evaluated.clone().filter(|_| holds),
            ..SchemaBranch::array(mask, shape)
        };
        Ok(shapes.map(branch).collect())
    }

    /// Applies `unevaluatedProperties` and `unevaluatedItems` to what the other keywords allow.
    pub(super) fn unevaluated(
        &mut self,
        part: &OpenPart<'a>,
        branches: Vec<SchemaBranch<'a>>,
    ) -> Expanded<'a> {
        let mut all = Vec::new();
        for branch in branches {
            let evaluated = branch.evaluated.as_deref().cloned().unwrap_or_default();
            let (mut object, mut array) = (ObjectShape::default(), ArrayShape::default());
            let mut now = Evaluated::default();
            if let Some(value) = part.map.get("unevaluatedProperties") {
                (object.says_others, now.has_all_names) = (true, true);
                let condition = self.child(part, "unevaluatedProperties", value, true);
                let rest = self.goal(condition)?;
                if !evaluated.has_all_names && !rest.is_empty() {
                    let free = |name: &&'a str| (*name, Rc::new([]) as Goal);
                    let mut layer = ObjectLayer::new(evaluated.names.iter().map(free).collect());
                    layer.patterns = evaluated.patterns.iter().map(free).collect();
                    layer.rest = Some(rest);
                    object.layers.push(Rc::new(layer));
                }
            }
            if let Some(value) = part.map.get("unevaluatedItems") {
                now.has_all_items = true;
                let condition = self.child(part, "unevaluatedItems", value, true);
                let rest = Some(self.goal(condition)?);
                if !evaluated.has_all_items && rest.as_ref().is_some_and(|rest| !rest.is_empty()) {
                    if evaluated.has_some_items {
                        let problem = "which items `contains` takes is not known";
                        array.problem = Some((part.at("unevaluatedItems"), problem));
                    }
                    let first = vec![Rc::new([]) as Goal; evaluated.items];
                    array.layers.push(ArrayLayer { first, rest });
                }
            }
            let own = SchemaBranch {
                object: Some(Rc::new(object)),
                array: Some(Rc::new(array)),
                evaluated: Some(Rc::new(now)),
                ..SchemaBranch::of(types::ALL)
            };
            all.extend(branch.and(&own));
        }
        Ok(all)
    }
}

/// A number that is whole and not negative.
fn whole(value: &Value) -> Option<u64> {
    let number = || value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..1e15).contains(n));
    value.as_u64().or_else(|| number().map(|number| number as u64))
}
