//! Schemas as alternatives: each keyword, and its negation, as branches without choices.

use std::{collections::HashMap, rc::Rc, sync::LazyLock};

use moeflux_base::GrammarError;
use serde_json::{Map, Number, Value};

use super::{
    branch::{
        ArrayLayer, ArrayShape, Blame, Condition, Goal, NumberShape, ObjectLayer, ObjectShape,
        SchemaBranch, StringShape, type_of, types,
    },
    document::{NodeId, NodeKind, SchemaDocument, SchemaDraft},
    formats,
    patterns::PatternTests,
};
use crate::grammar::form::invalid;

/// Most alternatives of a part.
const MAX_BRANCHES: usize = 4096;

/// Most alternatives that are made for a schema.
const MAX_WORK: usize = 1_000_000;

/// Most schemas of `anyOf` whose subsets are taken apart.
const MAX_SUBSETS: usize = 5;

/// The schema that nothing satisfies.
static NEVER: Value = Value::Bool(false);

/// No keywords: those of a constant.
static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

/// Alternatives of a part.
pub(super) type Branches<'a> = Rc<[SchemaBranch<'a>]>;

/// Result of an expansion.
pub(super) type Expanded<'a> = Result<Vec<SchemaBranch<'a>>, GrammarError>;

/// A part whose keywords are being expanded.
#[derive(Clone, Copy)]
pub(super) struct OpenPart<'a> {
    pub(super) node: NodeId,
    pub(super) map: &'a Map<String, Value>,
    pub(super) blame: Option<Blame>,
    /// Whether a keyword asks which properties and items others have looked at.
    pub(super) tracks: bool,
}

impl OpenPart<'_> {
    pub(super) fn at(&self, keyword: &'static str) -> Blame {
        self.blame.unwrap_or(Blame { node: self.node, keyword })
    }
}

/// Expands the parts of a document.
pub(super) struct Expander<'a> {
    pub(super) document: SchemaDocument<'a>,
    pub(super) tests: PatternTests,
    known: HashMap<(Condition, bool), Branches<'a>>,
    open: Vec<(NodeId, bool)>,
    work: usize,
}

impl<'a> Expander<'a> {
    pub(super) fn new(document: SchemaDocument<'a>) -> Self {
        Self {
            document,
            tests: PatternTests::default(),
            known: HashMap::new(),
            open: Vec::new(),
            work: 0,
        }
    }

    /// An error at a keyword.
    pub(super) fn refused(&self, blame: Blame, problem: &str) -> GrammarError {
        let path = self.document.path(blame.node, blame.keyword);
        invalid(path, format!("cannot be enforced: {problem}"))
    }

    pub(super) fn wrong(&self, part: &OpenPart<'a>, keyword: &str, expected: &str) -> GrammarError {
        invalid(self.document.path(part.node, keyword), format!("must be {expected}"))
    }

    /// The condition that never holds.
    pub(super) fn never(&mut self) -> Condition {
        let root = self.document.root();
        let node = self.document.child(root, "", &NEVER);
        Condition { node, holds: true, blame: None }
    }

    /// A goal of one condition; without it if it always holds.
    pub(super) fn goal(&mut self, condition: Condition) -> Result<Goal, GrammarError> {
        let mut condition = condition;
        // A part that only refers is the part to which it refers.
        for _ in 0..64 {
            let Some(map) = self.document.keywords(condition.node) else { break };
            if self.document.node(condition.node).kind == NodeKind::Constant {
                break;
            }
            let mut keys = map.keys().filter(|key| is_constraint(key));
            match (keys.next().map(String::as_str), keys.next()) {
                (None, _) if condition.holds => return Ok(Rc::new([])),
                (Some("$ref"), None) => condition.node = self.reference(condition.node, map)?,
                _ => break,
            }
        }
        let node = self.document.node(condition.node);
        let is_free = node.kind == NodeKind::Schema && *node.value == Value::Bool(condition.holds);
        Ok(if is_free { Rc::new([]) } else { Rc::new([condition]) })
    }

    /// Goals together, each condition once.
    pub(super) fn all(goals: &[Goal]) -> Goal {
        if let [goal] = goals {
            return Rc::clone(goal);
        }
        let mut all: Vec<Condition> = Vec::new();
        for condition in goals.iter().flat_map(|goal| goal.iter()) {
            let is_same =
                |own: &Condition| (own.node, own.holds) == (condition.node, condition.holds);
            if !all.iter().any(is_same) {
                all.push(*condition);
            }
        }
        all.into()
    }

    fn reference(&mut self, id: NodeId, map: &Map<String, Value>) -> Result<NodeId, GrammarError> {
        let path = self.document.path(id, "$ref");
        let Some(text) = map.get("$ref").and_then(Value::as_str) else {
            return Err(invalid(path, "must be a string"));
        };
        let target = self.document.target(id, text);
        target.map_err(|problem| invalid(path, format!("cannot be enforced: {problem}")))
    }

    /// Alternatives of a goal.
    pub(super) fn branches(&mut self, goal: &[Condition]) -> Result<Branches<'a>, GrammarError> {
        if let [condition] = goal {
            return self.condition(*condition, false);
        }
        let mut all = vec![SchemaBranch::of(types::ALL)];
        for condition in goal {
            let next = self.condition(*condition, false)?;
            all = self.product(&all, &next, *condition)?;
        }
        Ok(all.into())
    }

    /// Values that a branch of both lists allows, as branches.
    pub(super) fn product(
        &mut self,
        own: &[SchemaBranch<'a>],
        other: &[SchemaBranch<'a>],
        condition: Condition,
    ) -> Expanded<'a> {
        let mut all = Vec::new();
        for one in own {
            for two in other {
                self.work += 1;
                all.extend(one.and(two));
            }
            if all.len() > MAX_BRANCHES || self.work > MAX_WORK {
                let blame = condition.blame;
                let blame = blame.unwrap_or(Blame { node: condition.node, keyword: "" });
                return Err(self.refused(blame, "it has too many alternatives"));
            }
        }
        Ok(all)
    }

    /// Alternatives of a condition. `tracks` records what keywords have looked at.
    pub(super) fn condition(
        &mut self,
        condition: Condition,
        tracks: bool,
    ) -> Result<Branches<'a>, GrammarError> {
        if let Some(known) = self.known.get(&(condition, tracks)) {
            return Ok(Rc::clone(known));
        }
        let Condition { node, holds, blame } = condition;
        if self.open.contains(&(node, holds)) {
            let blame = Blame { node, keyword: "" };
            return Err(
                self.refused(blame, "the schema refers to itself, without a property between")
            );
        }
        self.open.push((node, holds));
        let part = self.document.node(node);
        let branches = match (part.kind, part.value) {
            (NodeKind::Constant, value) => self.constant(node, value, holds, blame),
            (_, Value::Bool(any)) => {
                Ok(if *any == holds { vec![SchemaBranch::of(types::ALL)] } else { Vec::new() })
            }
            (_, Value::Object(map)) => self.part(OpenPart { node, map, blame, tracks }, holds),
            _ => Err(invalid(
                self.document.path(node, ""),
                "must be a schema: an object or a boolean",
            )),
        };
        self.open.pop();
        let branches: Branches<'a> = branches?.into();
        self.work += branches.len();
        self.known.insert((condition, tracks), Rc::clone(&branches));
        Ok(branches)
    }

    fn part(&mut self, mut part: OpenPart<'a>, holds: bool) -> Expanded<'a> {
        let unevaluated = ["unevaluatedProperties", "unevaluatedItems"];
        let asks = unevaluated.iter().any(|keyword| part.map.contains_key(*keyword));
        part.tracks |= asks;
        if !holds && asks {
            let keyword = unevaluated.into_iter().find(|keyword| part.map.contains_key(*keyword));
            let blame = part.at(keyword.unwrap_or_default());
            return Err(self.refused(blame, "its negation has no form"));
        }
        let is_reference =
            self.document.draft(part.node) <= SchemaDraft::Seven && part.map.contains_key("$ref");
        let mut all = if holds { vec![SchemaBranch::of(types::ALL)] } else { Vec::new() };
        let condition = Condition { node: part.node, holds, blame: part.blame };
        let mut groups = Vec::new();
        for (key, value) in part.map {
            if is_reference && key != "$ref" || !is_constraint(key) {
                continue;
            }
            // Keywords that depend on each other are expanded with the first one.
            let group = group(key);
            if groups.contains(&group) {
                continue;
            }
            groups.push(group);
            let value = part.map.get(group).unwrap_or(value);
            if matches!(group, "if" | "contains") && !part.map.contains_key(group) {
                continue;
            }
            let Some(branches) = self.keyword(&part, group, value, holds)? else { continue };
            match holds {
                true => all = self.product(&all, &branches, condition)?,
                false => all.extend(branches),
            }
        }
        if asks && holds {
            all = self.unevaluated(&part, all)?;
        }
        Ok(all)
    }

    /// A child of a part as a condition. Its negation is blamed on the keyword.
    pub(super) fn child(
        &mut self,
        part: &OpenPart<'a>,
        keyword: &'static str,
        value: &'a Value,
        holds: bool,
    ) -> Condition {
        let node = self.document.child(part.node, keyword, value);
        let blame = if holds { part.blame } else { Some(part.at(keyword)) };
        Condition { node, holds, blame }
    }

    /// Alternatives of a keyword, or of its negation; `None` if it allows everything.
    fn keyword(
        &mut self,
        part: &OpenPart<'a>,
        group: &str,
        value: &'a Value,
        holds: bool,
    ) -> Result<Option<Vec<SchemaBranch<'a>>>, GrammarError> {
        let all = if holds { types::ALL } else { 0 };
        Ok(Some(match group {
            "$ref" | "$dynamicRef" | "$recursiveRef" => {
                let node = self.any_reference(part, group)?;
                self.condition(Condition { node, holds, blame: part.blame }, part.tracks)?.to_vec()
            }
            "type" => self.types(part, value, holds)?,
            "enum" => {
                let list = value.as_array();
                let list = list.ok_or_else(|| self.wrong(part, "enum", "a list"))?;
                self.values(part, "enum", &list.iter().collect::<Vec<_>>(), holds)?
            }
            "const" => self.values(part, "const", &[value], holds)?,
            "allOf" | "anyOf" | "oneOf" => self.combination(part, group, holds)?,
            "not" => {
                let inner = self.child(part, "not", value, !holds);
                let blame = Some(part.at("not"));
                let branches = self.condition(Condition { blame, ..inner }, false)?;
                branches.iter().map(|b| SchemaBranch { evaluated: None, ..b.clone() }).collect()
            }
            "if" => return self.decision(part, value, holds),
            "dependencies" | "dependentSchemas" | "dependentRequired" => {
                self.dependencies(part, group, value, holds)?
            }
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => {
                return self.limit(part, group, value, holds);
            }
            "multipleOf" => {
                let number = value.as_number().filter(|n| n.as_f64().is_some_and(|n| n > 0.0));
                let number =
                    number.ok_or_else(|| self.wrong(part, "multipleOf", "a number above 0"))?;
                let mut shape = NumberShape::default();
                match holds {
                    true => shape.multiples.push(number.clone()),
                    false => shape.no_multiples.push((number.clone(), part.at("multipleOf"))),
                }
                vec![SchemaBranch::number(all | types::NUMBER, shape)]
            }
            "minLength" | "maxLength" | "minItems" | "maxItems" | "minProperties"
            | "maxProperties" => self.size(part, group, value, holds)?,
            "pattern" => {
                let text = value.as_str().ok_or_else(|| self.wrong(part, "pattern", "a string"))?;
                let mut shape = StringShape::default();
                let list = if holds { &mut shape.patterns } else { &mut shape.no_patterns };
                list.push((text, part.at("pattern")));
                vec![SchemaBranch::string(all | types::STRING, shape)]
            }
            "format" => {
                let Some(format) = value.as_str().and_then(formats::known) else {
                    return Ok(None);
                };
                let mut shape = StringShape::default();
                match holds {
                    true => shape.formats.push(format),
                    false => shape.no_patterns.push((format.pattern, part.at("format"))),
                }
                vec![SchemaBranch::string(all | types::STRING, shape)]
            }
            "properties" => self.properties(part, holds)?,
            "propertyNames" => self.names(part, value, holds)?,
            "required" => {
                let names = self.texts(part, "required", value)?;
                match holds {
                    true => vec![SchemaBranch::object(types::ALL, ObjectShape::required(names))],
                    false => self.missing(&names)?,
                }
            }
            "items" => self.items(part, holds)?,
            "contains" => self.contains(part, value, holds)?,
            "uniqueItems" => {
                let is_unique = value.as_bool();
                match is_unique.ok_or_else(|| self.wrong(part, "uniqueItems", "a boolean"))? {
                    false => return Ok(None),
                    true => {
                        let blame = part.at("uniqueItems");
                        let mut shape = ArrayShape::default();
                        match holds {
                            true => shape.unique = Some(blame),
                            false => shape.problem = Some((blame, "its negation has no form")),
                        }
                        vec![SchemaBranch::array(all | types::ARRAY, shape)]
                    }
                }
            }
            _ => return Ok(None),
        }))
        .map(|branches| match (holds, branches) {
            // A negation that nothing satisfies is no alternative.
            (false, Some(branches)) if branches.is_empty() => None,
            (_, branches) => branches,
        })
    }

    fn any_reference(&mut self, part: &OpenPart<'a>, group: &str) -> Result<NodeId, GrammarError> {
        if group == "$ref" {
            return self.reference(part.node, part.map);
        }
        let text = part.map[group].as_str().unwrap_or_default();
        let target = match group {
            "$dynamicRef" => self.document.dynamic_target(part.node, text),
            _ => self.document.recursive_target(part.node),
        };
        let path = self.document.path(part.node, group);
        target.map_err(|problem| invalid(path, format!("cannot be enforced: {problem}")))
    }

    fn types(&mut self, part: &OpenPart<'a>, value: &'a Value, holds: bool) -> Expanded<'a> {
        let names = match value {
            Value::String(name) => vec![name.as_str()],
            value => self.texts(part, "type", value)?,
        };
        let (mut mask, mut has_integer) = (0, false);
        for name in names {
            mask |= match name {
                "null" => types::NULL,
                "boolean" => types::FALSE | types::TRUE,
                "number" => types::NUMBER,
                "string" => types::STRING,
                "array" => types::ARRAY,
                "object" => types::OBJECT,
                "integer" => {
                    has_integer = true;
                    0
                }
                other => {
                    let problem = format!("{other:?} is no type of JSON");
                    return Err(invalid(self.document.path(part.node, "type"), problem));
                }
            };
        }
        let is_integer = has_integer && mask & types::NUMBER == 0;
        let mut shape = NumberShape::default();
        Ok(vec![match (holds, is_integer) {
            (true, true) => {
                shape.is_integer = true;
                SchemaBranch::number(mask | types::NUMBER, shape)
            }
            (true, false) => SchemaBranch::of(mask),
            (false, true) => {
                shape.no_multiples.push((Number::from(1), part.at("type")));
                SchemaBranch::number(types::ALL & !mask, shape)
            }
            (false, false) if mask == types::ALL => return Ok(Vec::new()),
            (false, false) => SchemaBranch::of(types::ALL & !mask),
        }])
    }

    /// One of these values, or none of them.
    fn values(
        &mut self,
        part: &OpenPart<'a>,
        keyword: &'static str,
        values: &[&'a Value],
        holds: bool,
    ) -> Expanded<'a> {
        if holds {
            let types = values.iter().fold(0, |all, value| all | type_of(value));
            let values = Some(values.to_vec().into());
            let branch = SchemaBranch { values, ..SchemaBranch::of(types) };
            return Ok(if types == 0 { Vec::new() } else { vec![branch] });
        }
        let (mut number, mut string) = (NumberShape::default(), StringShape::default());
        let (mut mask, mut nested) = (types::ALL, Vec::new());
        for value in values {
            match value {
                Value::Number(value) => number.excluded.push(value.clone()),
                Value::String(text) => string.excluded.push(text),
                Value::Array(_) | Value::Object(_) => nested.push(*value),
                scalar => mask &= !type_of(scalar),
            }
        }
        let number = SchemaBranch::number(mask, number);
        let Some(others) = number.and(&SchemaBranch::string(mask, string)) else {
            return Ok(Vec::new());
        };
        let mut all = vec![others];
        for value in nested {
            let node = self.document.constant(part.node, keyword, value);
            let condition = Condition { node, holds, blame: Some(part.at(keyword)) };
            let branches = self.condition(condition, false)?;
            all = self.product(&all, &branches, condition)?;
        }
        Ok(all)
    }

    /// A constant in a constant, or what differs from it.
    fn constant(
        &mut self,
        node: NodeId,
        value: &'a Value,
        holds: bool,
        blame: Option<Blame>,
    ) -> Expanded<'a> {
        let part = OpenPart { node, map: &EMPTY, blame, tracks: false };
        let own = type_of(value);
        let differs = |expander: &mut Self, step: &str, value| -> Result<Goal, GrammarError> {
            let node = expander.document.constant(node, step, value);
            expander.goal(Condition { node, holds: false, blame })
        };
        match value {
            _ if holds => self.values(&part, "const", &[value], true),
            Value::Array(items) => {
                let count = items.len() as u64;
                let mut all = vec![SchemaBranch::of(types::ALL & !own)];
                let longer = ArrayShape { shortest: count + 1, ..ArrayShape::default() };
                all.push(SchemaBranch::array(own, longer));
                if let Some(shorter) = count.checked_sub(1) {
                    let shape = ArrayShape { longest: Some(shorter), ..ArrayShape::default() };
                    all.push(SchemaBranch::array(own, shape));
                }
                for (index, item) in items.iter().enumerate() {
                    let mut first: Vec<Goal> = (0..index).map(|_| Goal::default()).collect();
                    first.push(differs(self, &index.to_string(), item)?);
                    let layers = vec![ArrayLayer { first, rest: None }];
                    let (shortest, longest) = (count, Some(count));
                    let shape = ArrayShape { shortest, longest, layers, ..ArrayShape::default() };
                    all.push(SchemaBranch::array(own, shape));
                }
                Ok(all)
            }
            Value::Object(map) => {
                let names: Vec<&str> = map.keys().map(String::as_str).collect();
                let mut all = vec![SchemaBranch::of(types::ALL & !own)];
                all.extend(self.missing(&names)?);
                let mut more = ObjectShape::required(names);
                more.fewest = map.len() as u64 + 1;
                all.push(SchemaBranch::object(own, more));
                for (name, value) in map {
                    let goal = differs(self, name, value)?;
                    all.push(SchemaBranch::object(own, ObjectShape::property(name, goal)));
                }
                Ok(all)
            }
            _ => self.values(&part, "const", &[value], false),
        }
    }

    /// Objects that lack one of these properties.
    pub(super) fn missing(&mut self, names: &[&'a str]) -> Expanded<'a> {
        let never = self.never();
        let goal = self.goal(never)?;
        let lacks = names.iter().map(|name| {
            let layer = ObjectLayer::new(vec![(*name, Rc::clone(&goal))]);
            let shape = ObjectShape { layers: vec![Rc::new(layer)], ..ObjectShape::default() };
            SchemaBranch::object(types::OBJECT, shape)
        });
        Ok(lacks.collect())
    }

    pub(super) fn texts(
        &self,
        part: &OpenPart<'a>,
        keyword: &str,
        value: &'a Value,
    ) -> Result<Vec<&'a str>, GrammarError> {
        let texts = value.as_array().and_then(|list| list.iter().map(Value::as_str).collect());
        texts.ok_or_else(|| self.wrong(part, keyword, "a list of strings"))
    }

    /// Schemas in the list of a keyword as conditions.
    pub(super) fn list(
        &mut self,
        part: &OpenPart<'a>,
        keyword: &'static str,
    ) -> Result<Vec<Condition>, GrammarError> {
        let list = part.map[keyword].as_array().filter(|list| !list.is_empty());
        let list = list.ok_or_else(|| self.wrong(part, keyword, "a list of schemas, not empty"))?;
        Ok(list.iter().map(|value| self.child(part, keyword, value, true)).collect())
    }

    pub(super) fn negated(
        part: &OpenPart<'a>,
        keyword: &'static str,
        condition: Condition,
    ) -> Condition {
        Condition { holds: !condition.holds, blame: Some(part.at(keyword)), ..condition }
    }

    fn combination(&mut self, part: &OpenPart<'a>, group: &str, holds: bool) -> Expanded<'a> {
        match (group, holds) {
            ("allOf", true) => {
                let list = self.list(part, "allOf")?;
                self.every(part, &list)
            }
            ("allOf", false) => {
                let list = self.list(part, "allOf")?;
                self.any(
                    part,
                    &list.iter().map(|c| Self::negated(part, "allOf", *c)).collect::<Vec<_>>(),
                )
            }
            ("anyOf", true) => {
                let list = self.list(part, "anyOf")?;
                if part.tracks && list.len() > 1 {
                    self.subsets(part, &list)
                } else {
                    self.any(part, &list)
                }
            }
            ("anyOf", false) => {
                let list = self.list(part, "anyOf")?;
                self.every(
                    part,
                    &list.iter().map(|c| Self::negated(part, "anyOf", *c)).collect::<Vec<_>>(),
                )
            }
            (_, true) => self.one_of(part),
            (_, false) => {
                // None, or two of them.
                let list = self.list(part, "oneOf")?;
                let none: Vec<_> = list.iter().map(|c| Self::negated(part, "oneOf", *c)).collect();
                let mut all = self.every(part, &none)?;
                for (index, one) in list.iter().enumerate() {
                    for two in &list[index + 1..] {
                        all.extend(self.every(part, &[*one, *two])?);
                    }
                }
                Ok(all)
            }
        }
    }

    /// All conditions.
    pub(super) fn every(&mut self, part: &OpenPart<'a>, list: &[Condition]) -> Expanded<'a> {
        let mut all = vec![SchemaBranch::of(types::ALL)];
        for condition in list {
            let branches = self.condition(*condition, part.tracks)?;
            all = self.product(&all, &branches, *condition)?;
        }
        Ok(all)
    }

    /// Any of the conditions.
    fn any(&mut self, part: &OpenPart<'a>, list: &[Condition]) -> Expanded<'a> {
        let mut all: Vec<SchemaBranch<'a>> = Vec::new();
        for condition in list {
            for branch in self.condition(*condition, part.tracks)?.iter() {
                // Constants are one alternative.
                match (all.last_mut(), &branch.values) {
                    (Some(last), Some(values)) if last.is_values() && branch.is_values() => {
                        let own = last.values.iter().flat_map(|values| values.iter());
                        last.values = Some(own.chain(values.iter()).copied().collect());
                        last.types |= branch.types;
                    }
                    _ => all.push(branch.clone()),
                }
            }
        }
        Ok(all)
    }

    /// Any of the conditions, with all that hold: they tell which properties are evaluated.
    fn subsets(&mut self, part: &OpenPart<'a>, list: &[Condition]) -> Expanded<'a> {
        if list.len() > MAX_SUBSETS {
            let problem = "it has too many alternatives beside unevaluated properties or items";
            return Err(self.refused(part.at("anyOf"), problem));
        }
        let mut all = Vec::new();
        for mask in 1..1_u32 << list.len() {
            let chosen = list.iter().enumerate().filter(|(index, _)| mask >> index & 1 == 1);
            let chosen: Vec<_> = chosen.map(|(_, condition)| *condition).collect();
            all.extend(self.every(part, &chosen)?);
        }
        Ok(all)
    }

    /// `if` with `then` and `else`.
    fn decision(
        &mut self,
        part: &OpenPart<'a>,
        value: &'a Value,
        holds: bool,
    ) -> Result<Option<Vec<SchemaBranch<'a>>>, GrammarError> {
        let (then, otherwise) = (part.map.get("then"), part.map.get("else"));
        if then.is_none() && otherwise.is_none() && !part.tracks {
            return Ok(None);
        }
        let condition = self.child(part, "if", value, true);
        let mut all = Vec::new();
        for (holds_if, keyword, result) in [(true, "then", then), (false, "else", otherwise)] {
            let first = if holds_if { condition } else { Self::negated(part, "if", condition) };
            let mut list = vec![first];
            match result {
                Some(result) => {
                    let result = self.child(part, keyword, result, true);
                    list.push(if holds { result } else { Self::negated(part, keyword, result) });
                }
                None if !holds => continue,
                None => {}
            }
            all.extend(self.every(part, &list)?);
        }
        Ok(Some(all))
    }

    fn dependencies(
        &mut self,
        part: &OpenPart<'a>,
        group: &str,
        value: &'a Value,
        holds: bool,
    ) -> Expanded<'a> {
        let keyword = match group {
            "dependencies" => "dependencies",
            "dependentSchemas" => "dependentSchemas",
            _ => "dependentRequired",
        };
        let map = value.as_object().ok_or_else(|| self.wrong(part, keyword, "an object"))?;
        let node = part.node;
        let mut all = if holds { vec![SchemaBranch::of(types::ALL)] } else { Vec::new() };
        for (name, value) in map {
            let has_name = SchemaBranch::object(types::OBJECT, ObjectShape::required(vec![name]));
            let result = match value {
                Value::Array(_) => {
                    let names = self.texts(part, keyword, value)?;
                    match holds {
                        true => {
                            vec![SchemaBranch::object(types::OBJECT, ObjectShape::required(names))]
                        }
                        false => self.missing(&names)?,
                    }
                }
                value => {
                    let condition = self.child(part, keyword, value, true);
                    let condition =
                        if holds { condition } else { Self::negated(part, keyword, condition) };
                    self.condition(condition, part.tracks)?.to_vec()
                }
            };
            if holds && matches!(&result[..], [any] if any.is_free()) {
                continue;
            }
            let condition = Condition { node, holds, blame: Some(part.at(keyword)) };
            let mut branches = self.product(&[has_name], &result, condition)?;
            if !holds {
                all.extend(branches);
                continue;
            }
            branches.extend(self.missing(&[name])?);
            branches.push(SchemaBranch::of(types::ALL & !types::OBJECT));
            all = self.product(&all, &branches, condition)?;
        }
        Ok(all)
    }
}

impl<'a> ObjectShape<'a> {
    /// Objects with these properties.
    pub(super) fn required(names: Vec<&'a str>) -> Self {
        Self { asked: names.clone(), required: names, ..Self::default() }
    }

    /// Objects that have a property with a goal.
    pub(super) fn property(name: &'a str, goal: Goal) -> Self {
        let layer = ObjectLayer::new(vec![(name, goal)]);
        Self { required: vec![name], layers: vec![Rc::new(layer)], ..Self::default() }
    }
}

/// Whether a keyword may say something about a value.
pub(super) fn is_constraint(keyword: &str) -> bool {
    !group(keyword).is_empty()
}

/// The keyword with which another one is expanded; empty if it only describes.
fn group(keyword: &str) -> &'static str {
    const GROUPS: [&str; 29] = [
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "type",
        "enum",
        "const",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "dependencies",
        "dependentSchemas",
        "dependentRequired",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "pattern",
        "format",
        "propertyNames",
        "required",
        "uniqueItems",
    ];
    match keyword {
        "if" | "then" | "else" => "if",
        "properties" | "patternProperties" | "additionalProperties" => "properties",
        "items" | "prefixItems" | "additionalItems" => "items",
        "contains" | "minContains" | "maxContains" => "contains",
        "unevaluatedProperties" => "unevaluatedProperties",
        "unevaluatedItems" => "unevaluatedItems",
        other => GROUPS.into_iter().find(|name| *name == other).unwrap_or(""),
    }
}
