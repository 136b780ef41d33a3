//! Alternatives as a schema that the compiler of grammars takes: one type in each, choices by
//! `anyOf`, and shared parts in `$defs`.

use std::{
    collections::{HashMap, HashSet},
    rc::Rc,
};

use moeflux_base::GrammarError;
use serde_json::{Map, Value, json};

use super::{
    branch::{
        ArrayLayer, ArrayShape, Condition, Goal, NumberLimit, NumberShape, ObjectShape,
        SchemaBranch, StringShape, types,
    },
    document::{NodeId, SchemaDocument},
    expand::Expander,
    patterns,
    schema::SchemaRules,
};
use crate::grammar::form::invalid;

/// Deepest nesting of parts.
const MAX_DEPTH: usize = 128;

/// Most parts that are written.
const MAX_PARTS: usize = 200_000;

/// Most alternatives by which the number of properties is counted.
const MAX_COUNTED: usize = 256;

/// Farthest limit of numbers with decimals. The compiler takes no range up to a limit that is
/// farther, so that numbers end here.
const FARTHEST: f64 = 1e15;

/// State of a goal that was written.
#[derive(Clone, Copy)]
enum Written {
    /// It is being written; with the number of its definition if it is inside itself.
    Open(Option<usize>),
    /// It was written in its place.
    Once,
    /// It has a definition.
    Defined(usize),
    /// Nothing satisfies it.
    Never,
}

/// Writer of a schema.
pub(super) struct SchemaWriter<'a> {
    pub(super) expander: Expander<'a>,
    rules: SchemaRules,
    written: HashMap<Goal, Written>,
    definitions: Vec<Value>,
    /// Parts to which several references lead.
    shared: HashSet<NodeId>,
    depth: usize,
    parts: usize,
}

type WrittenValue = Result<Option<Value>, GrammarError>;

impl<'a> SchemaWriter<'a> {
    pub(super) fn new(mut document: SchemaDocument<'a>, rules: SchemaRules) -> Self {
        let shared = document.shared();
        Self {
            expander: Expander::new(document),
            rules,
            written: HashMap::new(),
            definitions: Vec::new(),
            shared,
            depth: 0,
            parts: 0,
        }
    }

    /// Writes a part and its definitions.
    ///
    /// # Errors
    /// A keyword cannot be enforced, or nothing satisfies the schema.
    pub(super) fn whole(mut self, node: NodeId) -> Result<Map<String, Value>, GrammarError> {
        let goal = self.expander.goal(Condition { node, holds: true, blame: None })?;
        let Some(root) = self.goal(&goal)? else {
            let path = self.expander.document.path(node, "");
            return Err(invalid(path, "the schema allows no answer"));
        };
        let mut root = match root {
            Value::Object(map) => map,
            _ => Map::new(),
        };
        if !self.definitions.is_empty() {
            let named = self.definitions.into_iter().enumerate();
            let named: Map<_, _> =
                named.map(|(index, value)| (format!("g{index}"), value)).collect();
            root.insert("$defs".to_owned(), Value::Object(named));
        }
        Ok(root)
    }

    fn definition(&mut self) -> usize {
        self.definitions.push(Value::Bool(true));
        self.definitions.len() - 1
    }

    fn refer(index: usize) -> Value {
        json!({"$ref": format!("#/$defs/g{index}")})
    }

    /// Schema of a goal; `None` if nothing satisfies it.
    fn goal(&mut self, goal: &Goal) -> WrittenValue {
        let Some(first) = goal.first().copied() else { return Ok(Some(Value::Bool(true))) };
        let is_shared = match self.written.get(goal).copied() {
            Some(Written::Never) => return Ok(None),
            Some(Written::Defined(index)) => return Ok(Some(Self::refer(index))),
            Some(Written::Open(index)) => {
                let index = index.unwrap_or_else(|| self.definition());
                self.written.insert(Rc::clone(goal), Written::Open(Some(index)));
                return Ok(Some(Self::refer(index)));
            }
            Some(Written::Once) => true,
            None => goal.len() == 1 && self.shared.contains(&first.node),
        };
        self.parts += 1;
        self.depth += 1;
        if self.depth > MAX_DEPTH || self.parts > MAX_PARTS {
            let path = self.expander.document.path(first.node, "");
            return Err(invalid(path, "cannot be enforced: the schema is too large or too deep"));
        }
        self.written.insert(Rc::clone(goal), Written::Open(None));
        let value = self.alternatives(goal)?;
        self.depth -= 1;
        let inner = match self.written.get(goal) {
            Some(Written::Open(inner)) => *inner,
            _ => None,
        };
        // Small parts are written in their places.
        let state = match (&value, inner) {
            (None, _) => Written::Never,
            (Some(_), Some(index)) => Written::Defined(index),
            (Some(value), None) if is_shared && is_nested(value) => {
                Written::Defined(self.definition())
            }
            (Some(_), None) => Written::Once,
        };
        self.written.insert(Rc::clone(goal), state);
        Ok(match (state, value) {
            (Written::Defined(index), Some(value)) => {
                self.definitions[index] = value;
                Some(Self::refer(index))
            }
            (_, value) => value,
        })
    }

    fn alternatives(&mut self, goal: &Goal) -> WrittenValue {
        let branches = self.expander.branches(goal)?;
        let mut pieces: Vec<Value> = Vec::new();
        for branch in branches.iter() {
            for piece in self.branch(branch)? {
                if piece == Value::Bool(true) {
                    return Ok(Some(piece));
                }
                if !pieces.contains(&piece) || pieces.len() > MAX_COUNTED {
                    pieces.push(piece);
                }
            }
        }
        Ok(match pieces.len() {
            0 => None,
            1 => pieces.pop(),
            _ => Some(json!({ "anyOf": pieces })),
        })
    }

    /// Schemas of a branch, one for each type.
    fn branch(&mut self, branch: &SchemaBranch<'a>) -> Result<Vec<Value>, GrammarError> {
        if let Some(values) = &branch.values {
            let mut kept: Vec<Value> = Vec::new();
            for value in values.iter() {
                if self.allows(branch, value)? {
                    kept.push((*value).clone());
                }
            }
            return Ok(if kept.is_empty() { Vec::new() } else { vec![json!({ "enum": kept })] });
        }
        let mut pieces = Vec::new();
        let has = |bit| branch.types & bit != 0;
        if branch.is_free() {
            return Ok(vec![Value::Bool(true)]);
        }
        if has(types::OBJECT) {
            pieces
                .extend(self.object(branch.object.as_deref().unwrap_or(&ObjectShape::default()))?);
        }
        if has(types::ARRAY) {
            pieces.extend(self.array(branch.array.as_deref().unwrap_or(&ArrayShape::default()))?);
        }
        if has(types::STRING) {
            let shape = StringShape::default();
            pieces.push(self.string(branch.string.as_deref().unwrap_or(&shape))?);
        }
        if has(types::NUMBER) {
            let shape = NumberShape::default();
            pieces.extend(self.number(branch.number.as_deref().unwrap_or(&shape))?);
        }
        match (has(types::TRUE), has(types::FALSE)) {
            (true, true) => pieces.push(json!({"type": "boolean"})),
            (false, false) => {}
            (value, _) => pieces.push(json!({ "const": value })),
        }
        if has(types::NULL) {
            pieces.push(json!({"type": "null"}));
        }
        Ok(pieces)
    }

    fn number(&mut self, shape: &NumberShape) -> Result<Vec<Value>, GrammarError> {
        if let Some((_, blame)) = shape.no_multiples.first() {
            let problem = "numbers that are no multiple, or no integer, have no form";
            return Err(self.expander.refused(*blame, problem));
        }
        let mut excluded = shape.excluded.clone();
        let key = |number: &serde_json::Number| number.as_f64().unwrap_or_default();
        excluded.sort_by(|a, b| key(a).total_cmp(&key(b)));
        excluded.dedup_by(|a, b| key(a) == key(b));
        // The ranges between the excluded numbers.
        let limits = excluded.into_iter().map(|number| NumberLimit { number, is_exclusive: true });
        let mut limits: Vec<_> = limits.map(Some).collect();
        limits.insert(0, None);
        limits.push(None);
        let mut pieces = Vec::new();
        for pair in limits.windows(2) {
            let between =
                NumberShape { least: pair[0].clone(), most: pair[1].clone(), ..Default::default() };
            let own = SchemaBranch::number(types::NUMBER, shape.clone());
            let Some(both) = own.and(&SchemaBranch::number(types::NUMBER, between)) else {
                continue;
            };
            pieces.extend(both.number.as_deref().map(number_piece));
        }
        Ok(pieces)
    }

    fn string(&mut self, shape: &StringShape<'a>) -> Result<Value, GrammarError> {
        if let Some((_, blame)) = shape.no_patterns.first() {
            let problem = "strings that do not match a pattern or a format have no form";
            return Err(self.expander.refused(*blame, problem));
        }
        let mut all = Vec::new();
        for (pattern, blame) in &shape.patterns {
            let parts = patterns::plain(pattern);
            all.extend(parts.map_err(|problem| self.expander.refused(*blame, &problem))?);
        }
        all.extend(shape.formats.iter().map(|format| format.pattern.to_owned()));
        if !shape.excluded.is_empty() {
            all.push(patterns::all_but(&shape.excluded));
        }
        let mut map = Map::new();
        map.insert("type".to_owned(), "string".into());
        if shape.shortest > 0 {
            map.insert("minLength".to_owned(), shape.shortest.into());
        }
        if let Some(longest) = shape.longest {
            map.insert("maxLength".to_owned(), longest.into());
        }
        let mut all = all.into_iter();
        if let Some(first) = all.next() {
            map.insert("pattern".to_owned(), first.into());
        }
        let rest: Vec<_> =
            all.map(|pattern| json!({"type": "string", "pattern": pattern})).collect();
        if !rest.is_empty() {
            map.insert("allOf".to_owned(), rest.into());
        }
        Ok(Value::Object(map))
    }

    fn array(&mut self, shape: &ArrayShape) -> WrittenValue {
        let mut shape = shape.clone();
        if let Some((blame, problem)) = shape.problem {
            return Err(self.expander.refused(blame, problem));
        }
        for count in std::mem::take(&mut shape.counts) {
            let is_met = count.least == 0;
            match count.most {
                None if is_met => {}
                Some(0) if is_met => {
                    let item = Condition {
                        holds: !count.item.holds,
                        blame: Some(count.blame),
                        ..count.item
                    };
                    let rest = Some(self.expander.goal(item)?);
                    let first = vec![Rc::new([]) as Goal; count.from];
                    shape.layers.push(ArrayLayer { first, rest });
                }
                _ => {
                    let problem = "how many items meet a schema cannot be counted";
                    return Err(self.expander.refused(count.blame, problem));
                }
            }
        }
        let none = Rc::new([]) as Goal;
        let count = shape.layers.iter().map(|layer| layer.first.len()).max().unwrap_or(0);
        let mut longest = shape.longest;
        let mut first = Vec::new();
        for index in 0..count {
            if longest.is_some_and(|longest| longest <= index as u64) {
                break;
            }
            let goals = shape.layers.iter().map(|layer| {
                layer.first.get(index).or(layer.rest.as_ref()).unwrap_or(&none).clone()
            });
            match self.goal(&Expander::all(&goals.collect::<Vec<_>>()))? {
                Some(value) => first.push(value),
                None => longest = Some(index as u64),
            }
        }
        let rests = shape.layers.iter().filter_map(|layer| layer.rest.clone());
        let rests: Vec<_> = rests.collect();
        let has_rest = longest.is_none_or(|longest| longest > count as u64);
        let rest = match has_rest && !rests.is_empty() {
            true => self.goal(&Expander::all(&rests))?,
            false => Some(Value::Bool(true)),
        };
        if rest.is_none() {
            longest = Some(longest.map_or(count as u64, |longest| longest.min(count as u64)));
        }
        if longest.is_some_and(|longest| longest < shape.shortest) {
            return Ok(None);
        }
        if let Some(blame) = shape.unique
            && longest.is_none_or(|longest| longest > 1)
        {
            let problem = "uniqueItems: true would have to compare all items with each other";
            return Err(self.expander.refused(blame, problem));
        }
        let mut map = Map::new();
        map.insert("type".to_owned(), "array".into());
        if !first.is_empty() {
            map.insert("prefixItems".to_owned(), first.into());
        }
        match rest {
            Some(Value::Bool(true)) => {}
            rest => {
                map.insert("items".to_owned(), rest.unwrap_or(Value::Bool(false)));
            }
        }
        if shape.shortest > 0 {
            map.insert("minItems".to_owned(), shape.shortest.into());
        }
        if let Some(longest) = longest {
            map.insert("maxItems".to_owned(), longest.into());
        }
        Ok(Some(Value::Object(map)))
    }

    fn object(&mut self, shape: &ObjectShape<'a>) -> Result<Vec<Value>, GrammarError> {
        if let Some((blame, problem)) = shape.problem {
            return Err(self.expander.refused(blame, problem));
        }
        if let Some(some) = shape.some.first() {
            let problem = "that a property of an unknown name exists has no form";
            return Err(self.expander.refused(some.blame, problem));
        }
        let Some(mut fields) = self.fields(shape)? else { return Ok(Vec::new()) };
        let is_closed = !self.rules.open_objects
            && !shape.says_others
            && shape.layers.iter().any(|layer| layer.is_list)
            && shape.fewest <= fields.named.len() as u64;
        if is_closed {
            let listed = |name: &str| {
                let is_asked = shape.asked.contains(&name);
                let mut lists = shape.layers.iter().filter(|layer| layer.is_list);
                is_asked || lists.any(|layer| layer.named(name).is_some())
            };
            if fields.named.iter().any(|field| field.is_required && !listed(field.name)) {
                return Ok(Vec::new());
            }
            fields.named.retain(|field| listed(field.name));
            (fields.patterns, fields.rest) = (Vec::new(), Value::Bool(false));
        }
        if fields.patterns.is_empty() && fields.rest == Value::Bool(false) {
            fields.named.retain(|field| field.value != Value::Bool(false));
        }
        self.counted(fields, shape)
    }

    /// Properties by their names; `None` if a required one cannot be.
    fn fields(&mut self, shape: &ObjectShape<'a>) -> Result<Option<Fields<'a>>, GrammarError> {
        let required: HashSet<&str> = shape.required.iter().copied().collect();
        let mut seen = HashSet::new();
        let listed = shape.layers.iter().flat_map(|layer| layer.names.iter());
        let listed = listed.map(|(name, _)| *name).chain(shape.required.iter().copied());
        let mut names: Vec<&'a str> = listed.filter(|name| seen.insert(*name)).collect();
        let only = self.names(shape, &mut names, &mut seen)?;
        let mut named = Vec::new();
        for name in names {
            let is_allowed = match &only {
                NameRule::Any => true,
                NameRule::Some(list) => list.contains(name),
                NameRule::Pattern(_) => self.name_holds(shape, name)?,
            };
            let goal = match is_allowed {
                true => self.property(shape, name)?,
                false => self.never()?,
            };
            let is_required = required.contains(name);
            match self.goal(&goal)? {
                Some(value) => named.push(Field { name, value, is_required }),
                None if is_required => return Ok(None),
                None => named.push(Field { name, value: Value::Bool(false), is_required }),
            }
        }
        let mut patterns: Vec<(String, Value)> = Vec::new();
        let mut rest_goals = Vec::new();
        for layer in &shape.layers {
            rest_goals.extend(layer.rest.clone());
            if matches!(only, NameRule::Some(_)) {
                continue;
            }
            for (pattern, _) in &layer.patterns {
                if patterns.iter().any(|(own, _)| own == pattern) {
                    continue;
                }
                let goals = shape.layers.iter().filter_map(|layer| {
                    let own = layer.patterns.iter().find(|(own, _)| own == pattern);
                    own.map(|(_, goal)| goal).or(layer.rest.as_ref()).cloned()
                });
                let goal = Expander::all(&goals.collect::<Vec<_>>());
                let value = self.goal(&goal)?.unwrap_or(Value::Bool(false));
                patterns.push(((*pattern).to_owned(), value));
            }
        }
        let rest = match &only {
            NameRule::Some(_) => Value::Bool(false),
            _ => self.goal(&Expander::all(&rest_goals))?.unwrap_or(Value::Bool(false)),
        };
        let rest = match only {
            NameRule::Pattern(_) if !patterns.is_empty() => {
                let blame = shape.names.first().map(|(_, blame)| *blame);
                let problem = "beside patternProperties, names cannot be limited";
                return Err(match blame {
                    Some(blame) => self.expander.refused(blame, problem),
                    None => invalid("", problem),
                });
            }
            NameRule::Pattern(pattern) => {
                patterns.push((pattern, rest));
                Value::Bool(false)
            }
            _ => rest,
        };
        Ok(Some(Fields { named, patterns, rest }))
    }

    fn never(&mut self) -> Result<Goal, GrammarError> {
        let never = self.expander.never();
        self.expander.goal(never)
    }

    /// Goal of the property of a name.
    pub(super) fn property(
        &mut self,
        shape: &ObjectShape<'a>,
        name: &str,
    ) -> Result<Goal, GrammarError> {
        let mut goals = Vec::new();
        for layer in &shape.layers {
            let named = layer.named(name).cloned();
            let mut is_known = named.is_some();
            goals.extend(named);
            for (pattern, goal) in &layer.patterns {
                if self.expander.tests.matches(pattern, name).ok_or_else(|| unknown(pattern))? {
                    goals.push(Rc::clone(goal));
                    is_known = true;
                }
            }
            if !is_known {
                goals.extend(layer.rest.clone());
            }
        }
        Ok(Expander::all(&goals))
    }

    /// Which names `propertyNames` allows. Those of a list are added to `names`.
    fn names(
        &mut self,
        shape: &ObjectShape<'a>,
        names: &mut Vec<&'a str>,
        seen: &mut HashSet<&'a str>,
    ) -> Result<NameRule<'a>, GrammarError> {
        let Some((_, blame)) = shape.names.first().copied() else { return Ok(NameRule::Any) };
        let goals = shape.names.iter().map(|(condition, _)| *condition);
        let branches = self.expander.branches(&goals.collect::<Vec<_>>())?;
        let mut listed = HashSet::new();
        let mut options = Vec::new();
        let (mut is_list, mut is_any) = (true, false);
        for branch in branches.iter().filter(|branch| branch.types & types::STRING != 0) {
            if let Some(values) = &branch.values {
                for text in values.iter().filter_map(|value| Some((value.as_str()?, *value))) {
                    if self.allows(branch, text.1)? && listed.insert(text.0) && seen.insert(text.0)
                    {
                        names.push(text.0);
                    }
                }
                continue;
            }
            is_list = false;
            let default = StringShape::default();
            let string = branch.string.as_deref().unwrap_or(&default);
            let has_length = string.shortest > 0 || string.longest.is_some();
            let mut all: Vec<String> = Vec::new();
            for (pattern, blame) in &string.patterns {
                let parts = patterns::plain(pattern);
                all.extend(parts.map_err(|problem| self.expander.refused(*blame, &problem))?);
            }
            // A format says nothing that its pattern does not.
            if all.is_empty() {
                all.extend(string.formats.iter().map(|format| format.pattern.to_owned()));
            }
            if !string.excluded.is_empty() {
                all.push(patterns::all_but(&string.excluded));
            }
            if has_length {
                all.push(patterns::of_length(string.shortest, string.longest));
            }
            match (all.pop(), all.is_empty(), string.no_patterns.is_empty()) {
                (None, _, true) => is_any = true,
                (Some(pattern), true, true) => options.push(format!("(?:{pattern})")),
                _ => {
                    let problem = "names with several conditions have no form";
                    return Err(self.expander.refused(blame, problem));
                }
            }
        }
        if is_any {
            return Ok(NameRule::Any);
        }
        if is_list {
            return Ok(NameRule::Some(listed));
        }
        options.extend(listed.into_iter().map(|text| format!("(?:{})", patterns::exactly(text))));
        options.sort();
        Ok(NameRule::Pattern(options.join("|")))
    }

    /// Whether the name of a property is allowed.
    pub(super) fn name_holds(
        &mut self,
        shape: &ObjectShape<'a>,
        name: &str,
    ) -> Result<bool, GrammarError> {
        let name = Value::from(name);
        let goals = shape.names.iter().map(|(condition, _)| *condition);
        self.satisfies(&goals.collect::<Vec<_>>(), &name)
    }

    /// Objects with the number of properties that is allowed. Optional ones are taken apart where
    /// they have to be counted.
    fn counted(
        &mut self,
        fields: Fields<'a>,
        shape: &ObjectShape<'a>,
    ) -> Result<Vec<Value>, GrammarError> {
        let required = fields.named.iter().filter(|field| field.is_required).count() as u64;
        let optional = fields.named.iter();
        let optional = optional.filter(|f| !f.is_required && f.value != Value::Bool(false)).count();
        let fewest = shape.fewest.max(required);
        let is_counted = fewest > required || shape.most.is_some();
        if shape.most.is_some_and(|most| most < fewest) {
            return Ok(Vec::new());
        }
        let is_closed = fields.rest == Value::Bool(false) && fields.patterns.is_empty();
        let possible = required + optional as u64;
        if is_closed && shape.fewest > possible {
            return Ok(Vec::new());
        }
        if optional == 0
            || !is_counted
            || is_closed && shape.most.is_some_and(|m| m >= possible) && fewest == required
        {
            let most = shape.most.filter(|_| !is_closed || optional == 0);
            return Ok(vec![fields.write(shape.fewest, most)]);
        }
        let mut all = Vec::new();
        let mut open = vec![(fields, fewest)];
        while let Some((mut fields, fewest)) = open.pop() {
            let count = fields.named.iter().filter(|field| field.is_required).count() as u64;
            let is_optional = |f: &Field<'_>| !f.is_required && f.value != Value::Bool(false);
            let next = fields.named.iter().position(is_optional);
            let is_full = shape.most.is_some_and(|most| count >= most);
            match next {
                Some(_) if is_full => {
                    for field in fields.named.iter_mut().filter(|field| is_optional(field)) {
                        field.value = Value::Bool(false);
                    }
                    (fields.patterns, fields.rest) = (Vec::new(), Value::Bool(false));
                    all.push(fields.write(fewest, None));
                }
                Some(_) if shape.most.is_none() && count >= fewest => {
                    all.push(fields.write(0, None));
                }
                Some(index) => {
                    let mut without = fields.clone();
                    without.named[index].value = Value::Bool(false);
                    fields.named[index].is_required = true;
                    open.extend([(without, fewest), (fields, fewest)]);
                }
                None if is_closed && count < fewest => {}
                None => all.push(fields.write(fewest, shape.most)),
            }
            if all.len() + open.len() > MAX_COUNTED {
                return Err(invalid("", "the number of properties has too many alternatives"));
            }
        }
        Ok(all)
    }
}

/// Names that an object may have.
enum NameRule<'a> {
    Any,
    /// These only.
    Some(HashSet<&'a str>),
    /// Those of a pattern.
    Pattern(String),
}

/// A property of a known name.
#[derive(Clone)]
struct Field<'a> {
    name: &'a str,
    value: Value,
    is_required: bool,
}

/// Properties of an object.
#[derive(Clone)]
struct Fields<'a> {
    named: Vec<Field<'a>>,
    patterns: Vec<(String, Value)>,
    rest: Value,
}

impl Fields<'_> {
    fn write(&self, fewest: u64, most: Option<u64>) -> Value {
        let mut map = Map::new();
        map.insert("type".to_owned(), "object".into());
        if !self.named.is_empty() {
            let named = self.named.iter();
            let named: Map<_, _> =
                named.map(|field| (field.name.to_owned(), field.value.clone())).collect();
            map.insert("properties".to_owned(), Value::Object(named));
        }
        let required = self.named.iter().filter(|field| field.is_required);
        let required: Vec<Value> = required.map(|field| field.name.into()).collect();
        let count = required.len() as u64;
        if !required.is_empty() {
            map.insert("required".to_owned(), required.into());
        }
        if !self.patterns.is_empty() {
            map.insert("patternProperties".to_owned(), self.patterns.iter().cloned().collect());
        }
        if self.rest != Value::Bool(true) {
            map.insert("additionalProperties".to_owned(), self.rest.clone());
        }
        if fewest > count {
            map.insert("minProperties".to_owned(), fewest.into());
        }
        if let Some(most) = most {
            map.insert("maxProperties".to_owned(), most.into());
        }
        Value::Object(map)
    }
}

fn number_piece(shape: &NumberShape) -> Value {
    let mut map = Map::new();
    let kind = if shape.is_integer { "integer" } else { "number" };
    map.insert("type".to_owned(), kind.into());
    let limits = [
        (&shape.least, "minimum", "exclusiveMinimum"),
        (&shape.most, "maximum", "exclusiveMaximum"),
    ];
    for (limit, keyword, exclusive) in limits {
        let Some(limit) = limit else { continue };
        let is_far = match keyword {
            "minimum" => limit.value() < -FARTHEST,
            _ => limit.value() > FARTHEST,
        };
        let far = if keyword == "minimum" { -FARTHEST } else { FARTHEST };
        let (keyword, number) = match (is_far && !shape.is_integer, limit.is_exclusive) {
            (true, _) => (keyword, Value::from(far)),
            (false, true) => (exclusive, Value::Number(limit.number.clone())),
            (false, false) => (keyword, Value::Number(limit.number.clone())),
        };
        map.insert(keyword.to_owned(), number);
    }
    let mut multiples = shape.multiples.iter();
    if let Some(first) = multiples.next() {
        map.insert("multipleOf".to_owned(), Value::Number(first.clone()));
    }
    let rest: Vec<_> =
        multiples.map(|number| json!({"type": "number", "multipleOf": number})).collect();
    if !rest.is_empty() {
        map.insert("allOf".to_owned(), rest.into());
    }
    Value::Object(map)
}

/// The error of a pattern that cannot be tested.
fn unknown(pattern: &str) -> GrammarError {
    invalid("", format!("the pattern {pattern:?} cannot be compared with names of properties"))
}

/// Whether a schema has others in it.
fn is_nested(value: &Value) -> bool {
    let nested = ["properties", "patternProperties", "prefixItems", "items", "anyOf"];
    let more = value.get("additionalProperties").is_some_and(Value::is_object);
    more || nested.iter().any(|keyword| value.get(keyword).is_some())
}
