//! Tests of single values: of constants beside other keywords, and of names.

use moeflux_base::GrammarError;
use serde_json::Value;

use super::{
    branch::{
        ArrayShape, Condition, Goal, NumberShape, ObjectShape, SchemaBranch, StringShape, is_equal,
        type_of, types,
    },
    expand::Expander,
    write::SchemaWriter,
};
use crate::grammar::form::invalid;

/// Longest list whose items are compared with each other.
const MAX_COMPARED: usize = 2000;

impl<'a> SchemaWriter<'a> {
    /// Whether a value satisfies a goal.
    pub(super) fn satisfies(
        &mut self,
        goal: &[Condition],
        value: &Value,
    ) -> Result<bool, GrammarError> {
        for branch in self.expander.branches(goal)?.iter() {
            let is_listed = branch.values.as_ref();
            if is_listed.is_none_or(|values| values.iter().any(|v| is_equal(v, value)))
                && self.allows(branch, value)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether a branch allows a value, beside its list of values.
    pub(super) fn allows(
        &mut self,
        branch: &SchemaBranch<'a>,
        value: &Value,
    ) -> Result<bool, GrammarError> {
        if branch.types & type_of(value) == 0 {
            return Ok(false);
        }
        match (type_of(value), branch) {
            (types::NUMBER, SchemaBranch { number: Some(shape), .. }) => {
                Ok(number_allows(shape, value))
            }
            (types::STRING, SchemaBranch { string: Some(shape), .. }) => {
                self.string_allows(shape, value.as_str().unwrap_or_default())
            }
            (types::ARRAY, SchemaBranch { array: Some(shape), .. }) => {
                self.array_allows(shape, value.as_array().map_or(&[][..], Vec::as_slice))
            }
            (types::OBJECT, SchemaBranch { object: Some(shape), .. }) => {
                self.object_allows(shape, value)
            }
            _ => Ok(true),
        }
    }

    fn string_allows(&mut self, shape: &StringShape<'a>, text: &str) -> Result<bool, GrammarError> {
        let length = text.chars().count() as u64;
        if length < shape.shortest
            || shape.longest.is_some_and(|longest| length > longest)
            || shape.excluded.contains(&text)
        {
            return Ok(false);
        }
        let patterns = shape.patterns.iter().map(|(pattern, blame)| (*pattern, true, Some(*blame)));
        let formats = shape.formats.iter().map(|format| (format.pattern, true, None));
        let others = shape.no_patterns.iter();
        let others = others.map(|(pattern, blame)| (*pattern, false, Some(*blame)));
        for (pattern, expected, blame) in patterns.chain(formats).chain(others) {
            match (self.expander.tests.matches(pattern, text), blame) {
                (Some(matches), _) if matches == expected => {}
                (Some(_), _) => return Ok(false),
                (None, Some(blame)) => {
                    let problem = "the pattern cannot be compared with a string";
                    return Err(self.expander.refused(blame, problem));
                }
                (None, None) => {}
            }
        }
        Ok(true)
    }

    fn array_allows(&mut self, shape: &ArrayShape, items: &[Value]) -> Result<bool, GrammarError> {
        let count = items.len() as u64;
        if count < shape.shortest || shape.longest.is_some_and(|longest| count > longest) {
            return Ok(false);
        }
        if let Some((blame, problem)) = shape.problem {
            return Err(self.expander.refused(blame, problem));
        }
        for layer in &shape.layers {
            for (index, item) in items.iter().enumerate() {
                if let Some(goal) = layer.first.get(index).or(layer.rest.as_ref())
                    && !self.satisfies(goal, item)?
                {
                    return Ok(false);
                }
            }
        }
        for counted in &shape.counts {
            let mut count = 0;
            for item in items.iter().skip(counted.from) {
                count += u64::from(self.satisfies(&[counted.item], item)?);
            }
            if count < counted.least || counted.most.is_some_and(|most| count > most) {
                return Ok(false);
            }
        }
        if shape.unique.is_some() {
            if items.len() > MAX_COMPARED {
                return Err(invalid("", "a constant is too long to compare its items"));
            }
            let is_twice = |(index, item)| items[..index].iter().any(|other| is_equal(item, other));
            return Ok(!items.iter().enumerate().any(is_twice));
        }
        Ok(true)
    }

    fn object_allows(
        &mut self,
        shape: &ObjectShape<'a>,
        value: &Value,
    ) -> Result<bool, GrammarError> {
        let Some(map) = value.as_object() else { return Ok(false) };
        let count = map.len() as u64;
        if count < shape.fewest
            || shape.most.is_some_and(|most| count > most)
            || shape.required.iter().any(|name| !map.contains_key(*name))
        {
            return Ok(false);
        }
        if let Some((blame, problem)) = shape.problem {
            return Err(self.expander.refused(blame, problem));
        }
        for (name, value) in map {
            let goal: Goal = self.property(shape, name)?;
            if !self.satisfies(&goal, value)? {
                return Ok(false);
            }
            if !shape.names.is_empty() && !self.name_holds(shape, name)? {
                return Ok(false);
            }
        }
        for some in &shape.some {
            let mut is_found = false;
            for (name, value) in map {
                let matches = |expander: &mut Expander<'a>, pattern: &str| {
                    expander.tests.matches(pattern, name).unwrap_or(false)
                };
                let is_there = match some.pattern {
                    Some(pattern) => matches(&mut self.expander, pattern),
                    None => {
                        let mut patterns = some.layer.patterns.iter();
                        some.layer.named(name).is_none()
                            && !patterns.any(|(p, _)| matches(&mut self.expander, p))
                    }
                };
                is_found |= is_there && self.satisfies(&[some.value], value)?;
            }
            if !is_found {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn number_allows(shape: &NumberShape, value: &Value) -> bool {
    let Some(number) = value.as_f64() else { return false };
    let divides = |divisor: &serde_json::Number| {
        let divisor = divisor.as_f64().unwrap_or(1.0);
        let quotient = number / divisor;
        (quotient - quotient.round()).abs() <= quotient.abs().max(1.0) * 1e-12
    };
    let is_above = shape.least.as_ref().is_none_or(|least| match least.is_exclusive {
        true => number > least.value(),
        false => number >= least.value(),
    });
    let is_below = shape.most.as_ref().is_none_or(|most| match most.is_exclusive {
        true => number < most.value(),
        false => number <= most.value(),
    });
    is_above
        && is_below
        && (!shape.is_integer || number.fract() == 0.0)
        && shape.multiples.iter().all(divides)
        && !shape.no_multiples.iter().any(|(divisor, _)| divides(divisor))
        && !shape.excluded.iter().any(|other| other.as_f64() == Some(number))
}
