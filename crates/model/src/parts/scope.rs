//! Tensors of a checkpoint below a common name prefix, as architectures look them up.

use moeflux_base::Error;
use moeflux_ops::Activation;

use crate::{
    blueprint::{LinearSource, MlpBlueprint, NormKind, NormSource},
    checkpoint::{
        MatrixSource, MatrixStack, VectorChange, VectorSource,
        source::{StackRequest, TensorSource},
    },
};

/// Projections of an MLP or an expert in slot order, as most layouts name them.
pub(crate) const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// Weights of a model's norms, as the Hub stores them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NormWeights {
    /// The factor is stored.
    Plain,
    /// `w` is stored, the factor is `1 + w`; exports to MLX store the factor.
    OnePlus,
    /// `w` is stored in exports to MLX too, the factor is `1 + w`.
    OnePlusInExports,
    /// The factor is stored; norms of the residual stream are LayerNorms.
    Layer,
}

/// A module of the model: a tensor source with a name prefix such as `model.layers.3.self_attn`.
#[derive(Clone)]
pub(crate) struct Scope<'a> {
    pub(crate) source: &'a dyn TensorSource,
    prefix: String,
    norms: NormWeights,
}

impl<'a> Scope<'a> {
    pub(crate) fn new(source: &'a dyn TensorSource, prefix: String, norms: NormWeights) -> Self {
        Self { source, prefix, norms }
    }

    /// The submodule `name`.
    pub(crate) fn child(&self, name: &str) -> Self {
        Self { prefix: self.path(name), ..self.clone() }
    }

    /// Full name of this module.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Index of the layer that the module is in.
    pub(crate) fn layer(&self) -> Option<usize> {
        let (_, rest) = self.prefix.split_once("layers.")?;
        rest.split('.').next()?.parse().ok().filter(|_| !self.prefix.contains("mtp"))
    }

    /// Full name of a tensor or module.
    pub(crate) fn path(&self, name: &str) -> String {
        match self.prefix.as_str() {
            "" => name.to_owned(),
            prefix => format!("{prefix}.{name}"),
        }
    }

    /// Whether the tensor `name` exists.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.source.has(&self.path(name))
    }

    /// Whether the matrix `name` exists, in any format.
    pub(crate) fn has_matrix(&self, name: &str) -> bool {
        self.source.has_matrix(&self.path(name))
    }

    /// Matrix `name.weight`.
    pub(crate) fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource, Error> {
        self.source.matrix(&self.path(name), rows, cols)
    }

    /// Matrix `name`, without `.weight`.
    pub(crate) fn bare_matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<MatrixSource, Error> {
        self.source.bare_matrix(&self.path(name), rows, cols)
    }

    /// A stack of matrices below this module.
    pub(crate) fn stack(&self, request: &StackRequest<'_>) -> Result<MatrixStack, Error> {
        self.source.stack(&StackRequest { name: &self.path(request.name), ..*request })
    }

    /// A stack of matrices below this module, as one matrix of `count * rows` rows.
    pub(crate) fn stacked_rows(&self, request: &StackRequest<'_>) -> Result<MatrixSource, Error> {
        self.source.stacked_rows(&StackRequest { name: &self.path(request.name), ..*request })
    }

    /// Matrix `name.weight`, with the bias `name.bias` if it exists.
    pub(crate) fn linear(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<LinearSource, Error> {
        Ok(LinearSource {
            weight: self.matrix(name, rows, cols)?,
            bias: self.optional_vector(&format!("{name}.bias"), rows)?,
        })
    }

    /// Vector `name` of `len` elements, as stored.
    pub(crate) fn vector(&self, name: &str, len: usize) -> Result<VectorSource, Error> {
        self.array(name, &[len])
    }

    /// Vector `name`, whose elements are stored in the dimensions `shape`.
    pub(crate) fn array(&self, name: &str, shape: &[usize]) -> Result<VectorSource, Error> {
        self.source.vector(&self.path(name), shape)
    }

    /// Logarithm `name` of `len` decays. Of a source that has computed the decays, `back` is the
    /// way to their logarithm.
    pub(crate) fn log_decays(
        &self,
        name: &str,
        len: usize,
        back: VectorChange,
    ) -> Result<VectorSource, Error> {
        let change = match self.source.changes().decays_computed {
            true => back,
            false => VectorChange::None,
        };
        Ok(VectorSource { change, ..self.vector(name, len)? })
    }

    /// Vector `name` of `len` elements, if it exists.
    pub(crate) fn optional_vector(
        &self,
        name: &str,
        len: usize,
    ) -> Result<Option<VectorSource>, Error> {
        self.has(name).then(|| self.vector(name, len)).transpose()
    }

    /// Weight `name.weight` of a norm, as a factor.
    pub(crate) fn norm(&self, name: &str, len: usize) -> Result<VectorSource, Error> {
        let change = match self.norms {
            NormWeights::OnePlus if !self.source.changes().one_added_to_norms => {
                VectorChange::PlusOne
            }
            NormWeights::OnePlusInExports => VectorChange::PlusOne,
            _ => VectorChange::None,
        };
        Ok(VectorSource { change, ..self.vector(&format!("{name}.weight"), len)? })
    }

    /// Norm `name` of the residual stream, of `len` elements.
    pub(crate) fn stream_norm(&self, name: &str, len: usize) -> Result<NormSource, Error> {
        let kind = match self.norms {
            NormWeights::Layer => {
                NormKind::Layer { bias: self.optional_vector(&format!("{name}.bias"), len)? }
            }
            NormWeights::Plain | NormWeights::OnePlus | NormWeights::OnePlusInExports => {
                NormKind::Rms
            }
        };
        Ok(NormSource { weight: self.norm(name, len)?, kind })
    }

    /// A norm that the config may enable (`Some(true)`) or disable (`Some(false)`). Without a
    /// setting it is used if it exists.
    pub(crate) fn norm_if(
        &self,
        enabled: Option<bool>,
        name: &str,
        len: usize,
    ) -> Result<Option<VectorSource>, Error> {
        let enabled = enabled.unwrap_or_else(|| self.has(&format!("{name}.weight")));
        enabled.then(|| self.norm(name, len)).transpose()
    }

    /// SwiGLU MLP of this module: `gate_proj`, `up_proj` and `down_proj`.
    pub(crate) fn mlp(&self, hidden: usize, intermediate: usize) -> Result<MlpBlueprint, Error> {
        self.mlp_of(PROJECTIONS, hidden, intermediate)
    }

    /// MLP of this module without a gate: `up_proj` and `down_proj`, a squared ReLU between.
    pub(crate) fn mlp_without_gate(
        &self,
        hidden: usize,
        intermediate: usize,
    ) -> Result<MlpBlueprint, Error> {
        let [_, up, down] = PROJECTIONS;
        Ok(MlpBlueprint {
            gate_proj: None,
            up_proj: self.matrix(up, intermediate, hidden)?,
            down_proj: self.matrix(down, hidden, intermediate)?,
            activation: Activation::Relu2,
        })
    }

    /// SwiGLU MLP with other names of gate, up and down.
    pub(crate) fn mlp_of(
        &self,
        [gate, up, down]: [&str; 3],
        hidden: usize,
        intermediate: usize,
    ) -> Result<MlpBlueprint, Error> {
        Ok(MlpBlueprint {
            gate_proj: Some(self.matrix(gate, intermediate, hidden)?),
            up_proj: self.matrix(up, intermediate, hidden)?,
            down_proj: self.matrix(down, hidden, intermediate)?,
            activation: Activation::SwiGlu,
        })
    }
}
