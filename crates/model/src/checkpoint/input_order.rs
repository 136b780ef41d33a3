//! Order of inputs by their groups: act-order of GPTQ (`g_idx`) and of compressed-tensors
//! (`weight_g_idx`).

use moeflux_base::Error;
use moeflux_ops::MAX_ORDERED;

use super::{folder::Checkpoint, location::InputOrder, source::TensorSource};

impl Checkpoint {
    /// Order in which the inputs of each group are neighbours, first group first, from the tensor
    /// `name` of the group of each of `cols` inputs. `None` without the tensor, or if that is the
    /// file's order.
    ///
    /// # Errors
    /// A group has not `group` inputs, or is none of the matrix.
    pub(super) fn input_order(
        &self,
        name: &str,
        cols: usize,
        group: usize,
    ) -> Result<Option<InputOrder>, Error> {
        if !self.has(name) {
            return Ok(None);
        }
        let t = self.tensor(name)?;
        self.check_shape(name, t, &[cols])?;
        if t.dtype != "I32" || t.bytes != 4 * cols as u64 {
            let problem = format!("its type is {}, groups of inputs are I32", t.dtype);
            return Err(self.tensor_error(name, &problem));
        }
        let mut bytes = vec![0; 4 * cols];
        self.read(name, &t.segment(), &mut bytes)?;
        let (groups, _) = bytes.as_chunks::<4>();
        let order = order_by_group(groups.iter().map(|bytes| i32::from_le_bytes(*bytes)), group);
        let order = order.map_err(|problem| self.tensor_error(name, &problem))?;
        let in_order = order.iter().enumerate().all(|(j, i)| j == *i);
        if in_order {
            return Ok(None);
        }
        if cols > MAX_ORDERED {
            let problem = format!(
                "its inputs are grouped in another order (\"desc_act\"), which is read for up to \
                 {MAX_ORDERED} of them, not {cols}"
            );
            return Err(self.tensor_error(name, &problem));
        }
        Ok(Some(order.into_iter().map(|i| i as u16).collect()))
    }
}

/// Inputs in the order of their groups, those of a group in the order of the file. Each of the
/// groups must have `group` inputs.
fn order_by_group(
    groups: impl ExactSizeIterator<Item = i32>,
    group: usize,
) -> Result<Vec<usize>, String> {
    let cols = groups.len();
    // Inputs of each group that were seen.
    let mut seen = vec![0; cols / group];
    let mut order = vec![0; cols];
    for (i, index) in groups.enumerate() {
        let found = usize::try_from(index).ok().filter(|index| *index < seen.len());
        let Some(index) = found else {
            return Err(format!("input {i} is of group {index}, of {} groups", seen.len()));
        };
        if seen[index] == group {
            return Err(format!("group {index} has more than {group} inputs"));
        }
        order[index * group + seen[index]] = i;
        seen[index] += 1;
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_sorted_by_group() {
        let order = |groups: &[i32]| order_by_group(groups.iter().copied(), 2);
        assert_eq!(order(&[0, 0, 1, 1]).unwrap(), [0, 1, 2, 3]);
        assert_eq!(order(&[1, 0, 2, 0, 2, 1]).unwrap(), [1, 3, 0, 5, 2, 4]);
        for (groups, part) in [
            (&[0, 0, 1, 2][..], "input 3 is of group 2, of 2 groups"),
            (&[0, -1, 1, 1], "input 1 is of group -1"),
            (&[1, 1, 1, 0], "group 1 has more than 2 inputs"),
        ] {
            let problem = order(groups).unwrap_err();
            assert!(problem.contains(part), "{problem}");
        }
    }
}
