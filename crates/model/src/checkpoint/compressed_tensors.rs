//! Integers as compressed-tensors publishes them: `pack-quantized`.

use moeflux_base::Error;
use moeflux_ops::{Affine, FileLayout, Format};

use super::{
    folder::Checkpoint,
    location::{MatrixStack, TensorInfo},
    matrix_request::{MatrixRequest, QuantSize},
    quantization::{NumberKind, ScaledPart, WeightScheme},
    source::TensorSource,
};

/// Suffix of the tensor that holds packed quants.
pub(super) const PACKED: &str = "weight_packed";

/// Suffix of the tensor of the group of each input: `actorder`.
const GROUPS: &str = "weight_g_idx";

impl Checkpoint {
    /// `pack-quantized`: `weight_packed`, quants in 32-bit words from the lowest bits on, and
    /// `weight_scale`, one per group of inputs. `w = scale * (q - 2^(bits - 1))`. The words are
    /// those of MLX's affine quantization, so the format is, with biases computed as they land.
    /// `weight_shape` repeats the shape and is not read.
    pub(super) fn pack_quantized_stack(
        &self,
        request: &MatrixRequest<'_>,
        t: &TensorInfo,
    ) -> Result<MatrixStack, Error> {
        let &MatrixRequest { name, weight, rows, cols, .. } = request;
        let scale_name = format!("{name}.weight_scale");
        let scales = self.tensor(&scale_name)?;
        if self.has(&format!("{name}.weight_zero_point")) {
            let problem = "it has zero points: only symmetric quantisation is supported";
            return Err(self.tensor_error(weight, problem));
        }
        let order_name = format!("{name}.{GROUPS}");
        if self.has(&order_name) && request.count.is_some() {
            let problem = "it has an order of its inputs (\"actorder\"), which is not supported \
                           for stacked matrices";
            return Err(self.tensor_error(weight, problem));
        }
        let scale = self.scalar(&scale_name, scales)?;
        let words = t.shape.last().copied().unwrap_or(0);
        let groups = scales.shape.last().copied().unwrap_or(0);
        let Some(QuantSize { bits: bits @ (4 | 8), group }) =
            QuantSize::from_shapes(cols, words, groups)
        else {
            let problem = format!(
                "weight_packed {:?} and weight_scale {:?} do not fit {rows} x {cols} weights of 4 \
                 or 8 bits as config.json asks",
                t.shape, scales.shape
            );
            return Err(self.tensor_error(weight, &problem));
        };
        self.check_shape(weight, t, &request.tensor_shape(&[rows, words]))?;
        self.check_shape(&scale_name, scales, &request.tensor_shape(&[rows, groups]))?;
        let part = ScaledPart::Group(group.into());
        self.check_scheme(weight, WeightScheme { kind: NumberKind::Integer, bits, part })?;
        let format = Format::Affine(Affine { bits, group, scale });
        let stack = self.build_stack(request, format, &[t, scales])?;
        let order = self.input_order(&order_name, cols, group.into())?;
        Ok(MatrixStack { layout: FileLayout::ZeroPoint(1 << (bits - 1)), order, ..stack })
    }
}

#[cfg(test)]
mod tests {
    use moeflux_ops::Scalar;
    use serde_json::{Value, json};

    use super::{
        super::{
            block_scaled::tests::{checkpoint, says},
            location::MatrixSource,
        },
        *,
    };

    /// The matrix `a`, 5 x 192, of packed words and scales, with more tensors.
    fn matrix(
        quantization: &Value,
        words: usize,
        groups: usize,
        others: &[(&str, &str, &[usize])],
    ) -> Result<MatrixSource, Error> {
        let (packed, scales) = ([5, words], [5, groups]);
        let mut tensors: Vec<(&str, &str, &[usize])> = vec![
            ("a.weight_packed", "I32", &packed),
            ("a.weight_scale", "BF16", &scales),
            ("a.weight_shape", "I64", &[2]),
        ];
        tensors.extend(others);
        checkpoint(quantization, &tensors).matrix("a", 5, 192)
    }

    fn weights(weights: &Value) -> Value {
        json!({"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}})
    }

    #[test]
    fn bits_and_groups_follow_from_the_shapes() {
        for (words, groups, bits, group, zero) in
            [(24, 12, 4, 16, 8), (24, 6, 4, 32, 8), (24, 3, 4, 64, 8), (48, 6, 8, 32, 128)]
        {
            let settings = json!({"num_bits": bits, "group_size": group, "symmetric": true});
            let m = matrix(&weights(&settings), words, groups, &[]).unwrap();
            let format = Format::Affine(Affine { bits, group, scale: Scalar::BF16 });
            assert_eq!((m.shape.format, m.layout), (format, FileLayout::ZeroPoint(zero)));
            assert_eq!(m.memory_bytes() - m.file_bytes(), 5 * groups * 2);
        }
    }

    #[test]
    fn what_is_not_symmetric_integers_is_refused() {
        let none = json!({});
        says(matrix(&none, 24, 24, &[]), &["a.weight_packed", "groups of 8", "16, 32, 64 and 128"]);
        says(matrix(&none, 24, 5, &[]), &["a.weight_packed", "[5, 5]", "5 x 192"]);
        says(matrix(&none, 23, 6, &[]), &["a.weight_packed", "[5, 23]"]);
        says(matrix(&none, 12, 6, &[]), &["a.weight_packed", "4 or 8 bits"]);
        let zero_points: [(&str, &str, &[usize]); 1] = [("a.weight_zero_point", "I32", &[5])];
        says(matrix(&none, 24, 6, &zero_points), &["a.weight_packed", "zero points"]);
        // The groups in the file are zeros.
        let groups: [(&str, &str, &[usize]); 1] = [("a.weight_g_idx", "I32", &[192])];
        says(matrix(&none, 24, 6, &groups), &["a.weight_g_idx", "group 0", "32 inputs"]);
        for settings in [
            json!({"num_bits": 8, "group_size": 32}),
            json!({"num_bits": 4, "group_size": 64}),
            json!({"num_bits": 4, "group_size": 32, "symmetric": false}),
            json!({"num_bits": 4, "group_size": 32, "type": "float"}),
        ] {
            let found = matrix(&weights(&settings), 24, 6, &[]);
            says(found, &["a.weight_packed", "4 bits in groups of 32", "quantization_config"]);
        }
        let floats: [(&str, &str, &[usize]); 2] =
            [("b.weight_packed", "F32", &[5, 24]), ("b.weight_scale", "U8", &[5, 6])];
        says(checkpoint(&none, &floats).matrix("b", 5, 192), &["b.weight_packed", "F32", "I32"]);
    }
}
