//! Orders of the inputs of a layer's experts: act-order of GPTQ.

use moeflux_ops::{ExpertOrders, ExpertShape};

use crate::checkpoint::InputOrder;

/// Orders of the inputs of a layer's experts in memory, by expert, as [`InputOrder`].
///
/// The activations of gate and up are gathered in their order. Down's needs no computation: rows of
/// gate and up stand in it in memory.
#[derive(Debug, PartialEq)]
pub struct InputOrders {
    /// `(experts, hidden)`: inputs of gate and up; empty if all are in the file's order.
    hidden: Vec<u16>,
    /// `(experts, intermediate)`: inputs of down; empty if all are in the file's order.
    inner: Vec<u16>,
}

impl InputOrders {
    /// Orders by expert; `None` stands for the file's. `None` if all are the file's.
    pub(crate) fn new(
        gate: &[Option<InputOrder>],
        down: &[Option<InputOrder>],
        shape: &ExpertShape,
    ) -> Option<Self> {
        let orders = Self {
            hidden: concatenated(gate, shape.up.cols),
            inner: concatenated(down, shape.down.cols),
        };
        (!orders.hidden.is_empty() || !orders.inner.is_empty()).then_some(orders)
    }

    /// `(experts, hidden)`: inputs of gate and up; empty if all are in the file's order.
    pub(crate) fn hidden(&self) -> &[u16] {
        &self.hidden
    }

    /// Orders of one expert.
    pub fn of_expert(&self, expert: usize, shape: &ExpertShape) -> ExpertOrders<'_> {
        let row = |orders, width| <[u16]>::chunks_exact(orders, width).nth(expert);
        ExpertOrders {
            inputs: row(&self.hidden, shape.up.cols).unwrap_or_default(),
            inner: row(&self.inner, shape.down.cols).unwrap_or_default(),
        }
    }
}

/// Orders of `width` inputs one after the other; empty if all are the file's.
fn concatenated(orders: &[Option<InputOrder>], width: usize) -> Vec<u16> {
    if orders.iter().all(Option::is_none) {
        return Vec::new();
    }
    let mut all = Vec::with_capacity(orders.len() * width);
    for order in orders {
        match order {
            Some(order) => all.extend_from_slice(order),
            None => all.extend((0..width).map(|i| i as u16)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use moeflux_ops::{Affine, Format, MatrixShape, Scalar};

    use super::*;

    #[test]
    fn experts_have_their_own_orders() {
        let format = Format::Affine(Affine { bits: 4, group: 2, scale: Scalar::F32 });
        let matrix = |rows, cols| MatrixShape { rows, cols, format };
        let shape = ExpertShape::new(matrix(2, 4), matrix(2, 4), matrix(4, 2));
        let order: Option<InputOrder> = Some([2, 0, 3, 1].into());
        let orders = InputOrders::new(&[None, order], &[None, None], &shape).unwrap();
        assert_eq!(orders.hidden(), [0, 1, 2, 3, 2, 0, 3, 1]);
        let ExpertOrders { inputs, inner } = orders.of_expert(1, &shape);
        assert_eq!((inputs, inner), (&[2, 0, 3, 1][..], &[][..]));
        assert_eq!(InputOrders::new(&[None], &[None], &shape), None);
    }
}
