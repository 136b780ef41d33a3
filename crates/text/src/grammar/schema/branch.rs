//! Alternatives of a schema: constraints of each type of JSON, without choices between them.

use std::{collections::HashMap, rc::Rc};

use serde_json::{Number, Value};

use super::{document::NodeId, formats::StringFormat};

/// Types of JSON as a set of bits. Both values of a boolean have one.
pub(super) mod types {
    pub(in super::super) const NULL: u8 = 1;
    pub(in super::super) const FALSE: u8 = 2;
    pub(in super::super) const TRUE: u8 = 4;
    pub(in super::super) const NUMBER: u8 = 8;
    pub(in super::super) const STRING: u8 = 16;
    pub(in super::super) const ARRAY: u8 = 32;
    pub(in super::super) const OBJECT: u8 = 64;
    pub(in super::super) const ALL: u8 = 127;
}

/// A part of the schema that holds, or does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Condition {
    pub(super) node: NodeId,
    pub(super) holds: bool,
    /// The keyword to name if the negation of a part cannot be enforced.
    pub(super) blame: Option<Blame>,
}

/// A keyword of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Blame {
    pub(super) node: NodeId,
    pub(super) keyword: &'static str,
}

/// Conditions that a value satisfies all; none allow every value.
pub(super) type Goal = Rc<[Condition]>;

/// Constraints that hold together.
#[derive(Clone, Default)]
pub(super) struct SchemaBranch<'a> {
    /// Types that are allowed; the constraints below are each for one of them.
    pub(super) types: u8,
    pub(super) number: Option<Rc<NumberShape>>,
    pub(super) string: Option<Rc<StringShape<'a>>>,
    pub(super) array: Option<Rc<ArrayShape>>,
    pub(super) object: Option<Rc<ObjectShape<'a>>>,
    /// The only values, of `enum` and `const`.
    pub(super) values: Option<Rc<[&'a Value]>>,
    /// Properties and items that keywords have looked at.
    pub(super) evaluated: Option<Rc<Evaluated<'a>>>,
}

/// Properties and items that keywords of a part and its alternatives have looked at.
#[derive(Clone, Default)]
pub(super) struct Evaluated<'a> {
    pub(super) names: Vec<&'a str>,
    pub(super) patterns: Vec<&'a str>,
    pub(super) has_all_names: bool,
    pub(super) items: usize,
    pub(super) has_all_items: bool,
    /// Whether `contains` has looked at items that are not known.
    pub(super) has_some_items: bool,
}

/// A limit of numbers.
#[derive(Clone, Debug)]
pub(super) struct NumberLimit {
    pub(super) number: Number,
    pub(super) is_exclusive: bool,
}

impl NumberLimit {
    pub(super) fn value(&self) -> f64 {
        self.number.as_f64().unwrap_or(f64::NAN)
    }
}

/// Constraints of numbers.
#[derive(Clone, Default)]
pub(super) struct NumberShape {
    pub(super) is_integer: bool,
    pub(super) least: Option<NumberLimit>,
    pub(super) most: Option<NumberLimit>,
    pub(super) multiples: Vec<Number>,
    pub(super) excluded: Vec<Number>,
    /// Divisors that do not divide it; 1 if it is no integer.
    pub(super) no_multiples: Vec<(Number, Blame)>,
}

/// Constraints of strings.
#[derive(Clone, Default)]
pub(super) struct StringShape<'a> {
    pub(super) shortest: u64,
    pub(super) longest: Option<u64>,
    pub(super) patterns: Vec<(&'a str, Blame)>,
    pub(super) formats: Vec<&'static StringFormat>,
    pub(super) excluded: Vec<&'a str>,
    /// Patterns that it does not match.
    pub(super) no_patterns: Vec<(&'a str, Blame)>,
}

/// Constraints of arrays.
#[derive(Clone, Default)]
pub(super) struct ArrayShape {
    pub(super) shortest: u64,
    pub(super) longest: Option<u64>,
    pub(super) layers: Vec<ArrayLayer>,
    pub(super) counts: Vec<ItemCount>,
    pub(super) unique: Option<Blame>,
    /// A keyword that has no form.
    pub(super) problem: Option<(Blame, &'static str)>,
}

/// The first items, and the others.
#[derive(Clone, Default)]
pub(super) struct ArrayLayer {
    pub(super) first: Vec<Goal>,
    pub(super) rest: Option<Goal>,
}

/// Number of items from an index on that satisfy a goal.
#[derive(Clone)]
pub(super) struct ItemCount {
    pub(super) from: usize,
    pub(super) item: Condition,
    pub(super) least: u64,
    pub(super) most: Option<u64>,
    pub(super) blame: Blame,
}

/// Constraints of objects.
#[derive(Clone, Default)]
pub(super) struct ObjectShape<'a> {
    pub(super) fewest: u64,
    pub(super) most: Option<u64>,
    pub(super) required: Vec<&'a str>,
    /// Names in `required` itself, which an answer may have though they are not listed.
    pub(super) asked: Vec<&'a str>,
    pub(super) layers: Vec<Rc<ObjectLayer<'a>>>,
    /// Goals of the names.
    pub(super) names: Vec<(Condition, Blame)>,
    /// Whether a keyword says something of properties that are not listed.
    pub(super) says_others: bool,
    /// A keyword that has no form.
    pub(super) problem: Option<(Blame, &'static str)>,
    /// Properties of which one exists: not of these names and patterns, with this goal.
    pub(super) some: Vec<SomeProperty<'a>>,
}

/// A property that exists, but whose name is not known.
#[derive(Clone)]
pub(super) struct SomeProperty<'a> {
    /// The pattern of its name; `None` for one that the layer does not list.
    pub(super) pattern: Option<&'a str>,
    pub(super) layer: Rc<ObjectLayer<'a>>,
    pub(super) value: Condition,
    pub(super) blame: Blame,
}

/// Goals of properties by their name.
#[derive(Clone, Default)]
pub(super) struct ObjectLayer<'a> {
    pub(super) names: Vec<(&'a str, Goal)>,
    pub(super) index: HashMap<&'a str, usize>,
    pub(super) patterns: Vec<(&'a str, Goal)>,
    pub(super) rest: Option<Goal>,
    /// Whether it lists properties that an answer may have.
    pub(super) is_list: bool,
}

impl<'a> ObjectLayer<'a> {
    pub(super) fn new(names: Vec<(&'a str, Goal)>) -> Self {
        let index = names.iter().enumerate().map(|(index, (name, _))| (*name, index)).collect();
        Self { names, index, ..Self::default() }
    }

    pub(super) fn named(&self, name: &str) -> Option<&Goal> {
        self.index.get(name).map(|index| &self.names[*index].1)
    }
}

impl<'a> SchemaBranch<'a> {
    /// Any value of these types.
    pub(super) fn of(types: u8) -> Self {
        Self { types, ..Self::default() }
    }

    pub(super) fn number(types: u8, shape: NumberShape) -> Self {
        Self { number: Some(Rc::new(shape)), ..Self::of(types) }
    }

    pub(super) fn string(types: u8, shape: StringShape<'a>) -> Self {
        Self { string: Some(Rc::new(shape)), ..Self::of(types) }
    }

    pub(super) fn array(types: u8, shape: ArrayShape) -> Self {
        Self { array: Some(Rc::new(shape)), ..Self::of(types) }
    }

    pub(super) fn object(types: u8, shape: ObjectShape<'a>) -> Self {
        Self { object: Some(Rc::new(shape)), ..Self::of(types) }
    }

    /// Whether it allows every value.
    pub(super) fn is_free(&self) -> bool {
        let has_shape = self.number.is_some()
            || self.string.is_some()
            || self.array.is_some()
            || self.object.is_some();
        self.types == types::ALL && self.values.is_none() && !has_shape
    }

    /// Whether it is values only.
    pub(super) fn is_values(&self) -> bool {
        let has_shape = self.number.is_some()
            || self.string.is_some()
            || self.array.is_some()
            || self.object.is_some();
        self.values.is_some() && !has_shape
    }

    /// Values that both allow; `None` if there are none.
    pub(super) fn and(&self, other: &Self) -> Option<Self> {
        let mut types = self.types & other.types;
        let values = match (&self.values, &other.values) {
            (Some(own), Some(others)) => {
                let both = own.iter().filter(|value| others.iter().any(|v| is_equal(value, v)));
                Some(both.copied().collect())
            }
            (Some(values), None) | (None, Some(values)) => Some(Rc::clone(values)),
            (None, None) => None,
        };
        let number = both(&self.number, &other.number, NumberShape::and);
        let string = both(&self.string, &other.string, StringShape::and);
        let array = both(&self.array, &other.array, ArrayShape::and);
        let object = both(&self.object, &other.object, ObjectShape::and);
        if number.as_ref().is_some_and(|shape| shape.is_empty()) {
            types &= !types::NUMBER;
        }
        if string.as_ref().is_some_and(|s| s.longest.is_some_and(|longest| longest < s.shortest)) {
            types &= !types::STRING;
        }
        if array.as_ref().is_some_and(|a| a.longest.is_some_and(|longest| longest < a.shortest)) {
            types &= !types::ARRAY;
        }
        if object.as_ref().is_some_and(|o| o.most.is_some_and(|most| most < o.fewest)) {
            types &= !types::OBJECT;
        }
        let evaluated = both(&self.evaluated, &other.evaluated, Evaluated::and);
        let branch = Self { types, number, string, array, object, values, evaluated };
        (types != 0 && branch.values.as_ref().is_none_or(|values| !values.is_empty()))
            .then_some(branch)
    }
}

/// The constraints of both, if there are any.
fn both<T>(
    own: &Option<Rc<T>>,
    other: &Option<Rc<T>>,
    and: impl FnOnce(&T, &T) -> T,
) -> Option<Rc<T>> {
    match (own, other) {
        (Some(own), Some(other)) => Some(Rc::new(and(own, other))),
        (own, other) => own.as_ref().or(other.as_ref()).cloned(),
    }
}

fn least<T: PartialOrd>(own: Option<T>, other: Option<T>) -> Option<T> {
    match (own, other) {
        (Some(own), Some(other)) => Some(if other < own { other } else { own }),
        (own, other) => own.or(other),
    }
}

fn joined<T: Clone>(own: &[T], other: &[T]) -> Vec<T> {
    [own, other].concat()
}

impl Evaluated<'_> {
    fn and(&self, other: &Self) -> Self {
        Self {
            names: joined(&self.names, &other.names),
            patterns: joined(&self.patterns, &other.patterns),
            has_all_names: self.has_all_names || other.has_all_names,
            items: self.items.max(other.items),
            has_all_items: self.has_all_items || other.has_all_items,
            has_some_items: self.has_some_items || other.has_some_items,
        }
    }
}

impl NumberShape {
    fn and(&self, other: &Self) -> Self {
        let stricter = |own: &Option<NumberLimit>, other: &Option<NumberLimit>, is_least: bool| {
            let (Some(a), Some(b)) = (own, other) else { return own.clone().or(other.clone()) };
            let (x, y) = (a.value(), b.value());
            let is_first = match x == y {
                true => a.is_exclusive,
                false => (x > y) == is_least,
            };
            Some(if is_first { a.clone() } else { b.clone() })
        };
        Self {
            is_integer: self.is_integer || other.is_integer,
            least: stricter(&self.least, &other.least, true),
            most: stricter(&self.most, &other.most, false),
            multiples: joined(&self.multiples, &other.multiples),
            excluded: joined(&self.excluded, &other.excluded),
            no_multiples: joined(&self.no_multiples, &other.no_multiples),
        }
    }

    /// Whether it surely allows no number.
    fn is_empty(&self) -> bool {
        let is_no_integer = self.no_multiples.iter().any(|(d, _)| d.as_f64() == Some(1.0));
        let (Some(least), Some(most)) = (&self.least, &self.most) else {
            return self.is_integer && is_no_integer;
        };
        let (low, high) = (least.value(), most.value());
        let is_open = least.is_exclusive || most.is_exclusive;
        low > high || low == high && is_open || self.is_integer && is_no_integer
    }
}

impl StringShape<'_> {
    fn and(&self, other: &Self) -> Self {
        let mut formats = self.formats.clone();
        for format in &other.formats {
            if formats.iter().all(|own| own.name != format.name) {
                formats.push(format);
            }
        }
        let mut patterns = self.patterns.clone();
        for pattern in &other.patterns {
            if patterns.iter().all(|own| own.0 != pattern.0) {
                patterns.push(*pattern);
            }
        }
        Self {
            shortest: self.shortest.max(other.shortest),
            longest: least(self.longest, other.longest),
            patterns,
            formats,
            excluded: joined(&self.excluded, &other.excluded),
            no_patterns: joined(&self.no_patterns, &other.no_patterns),
        }
    }
}

impl ArrayShape {
    fn and(&self, other: &Self) -> Self {
        Self {
            shortest: self.shortest.max(other.shortest),
            longest: least(self.longest, other.longest),
            layers: joined(&self.layers, &other.layers),
            counts: joined(&self.counts, &other.counts),
            unique: self.unique.or(other.unique),
            problem: self.problem.or(other.problem),
        }
    }
}

impl ObjectShape<'_> {
    fn and(&self, other: &Self) -> Self {
        Self {
            fewest: self.fewest.max(other.fewest),
            most: least(self.most, other.most),
            required: joined(&self.required, &other.required),
            asked: joined(&self.asked, &other.asked),
            layers: joined(&self.layers, &other.layers),
            names: joined(&self.names, &other.names),
            says_others: self.says_others || other.says_others,
            problem: self.problem.or(other.problem),
            some: joined(&self.some, &other.some),
        }
    }
}

/// Whether two values are the same in JSON, in which 1 is 1.0.
pub(super) fn is_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len()
                && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| is_equal(a, b)))
        }
        _ => one == other,
    }
}

/// Type of a value.
pub(super) fn type_of(value: &Value) -> u8 {
    match value {
        Value::Null => types::NULL,
        Value::Bool(true) => types::TRUE,
        Value::Bool(false) => types::FALSE,
        Value::Number(_) => types::NUMBER,
        Value::String(_) => types::STRING,
        Value::Array(_) => types::ARRAY,
        Value::Object(_) => types::OBJECT,
    }
}
