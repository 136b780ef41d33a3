//! Python's `range`.

use std::{fmt, sync::Arc};

use minijinja::{
    Error, ErrorKind, Value,
    value::{Enumerator, Object, ObjectRepr},
};

/// Maximum length, as in the sandbox of Jinja2.
const MAX_LEN: u128 = 100_000;

/// `range(start, stop, step)`.
#[derive(Debug)]
pub(super) struct PythonRange {
    start: i64,
    stop: i64,
    step: i64,
    len: usize,
}

/// Makes a range. A single argument is its end.
///
/// # Errors
/// The step is 0, or the range is too long.
pub(in crate::chat) fn range(
    start: i64,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let failed = |problem: String| Error::new(ErrorKind::InvalidOperation, problem);
    let (start, stop) = stop.map_or((0, start), |stop| (start, stop));
    let step = step.unwrap_or(1);
    let distance = i128::from(stop) - i128::from(start);
    let len = match step {
        0 => return Err(failed("range: the step must not be 0".to_owned())),
        step if (distance < 0) == (step < 0) => {
            distance.unsigned_abs().div_ceil(u128::from(step.unsigned_abs()))
        }
        _ => 0,
    };
    if len > MAX_LEN {
        return Err(failed(format!("range: expected {MAX_LEN} items at most, got {len}")));
    }
    Ok(Value::from_object(PythonRange { start, stop, step, len: len as usize }))
}

impl Object for PythonRange {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let index = key.as_usize().filter(|index| *index < self.len)?;
        // It is between start and stop, but the product may be larger.
        Some(Value::from(i128::from(self.start) + index as i128 * i128::from(self.step)))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len)
    }
}

impl fmt::Display for PythonRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PythonRange { start, stop, step, .. } = self;
        match step {
            1 => write!(f, "range({start}, {stop})"),
            step => write!(f, "range({start}, {stop}, {step})"),
        }
    }
}
