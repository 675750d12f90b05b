//! Linear layer: y = x w + b, over one dim or several.

mod adapted;

use super::dropout::Residual;
use crate::module::activation_point::ActivationPoint;
use crate::module::adapter::AdapterSlot;
use crate::module::param::{Init, Param};
use shardgrad_autograd::Var;
use shardgrad_tensor::{Value, ops};
use std::panic::Location;
use std::rc::Rc;

/// Linear layer, y = x w + b. The weight is `[in.., out..]`, the bias `[out..]`.
///
/// An adapter ([`Module::adapt`](crate::Module::adapt)) adds its term to x w, before `out`.
///
/// Activation points: `input`, on x, and `out`, on the product, before bias and residual are added. With row-parallel weights the
/// product is a partial sum at `out`; a rule of the plan for `out` states the layout to which the sum is reduced.
#[doc(alias = "nn.Linear")]
#[doc(alias = "Dense")]
#[doc(alias = "ColumnParallelLinear")]
#[doc(alias = "RowParallelLinear")]
#[derive(Debug)]
pub struct Linear {
    /// `[in.., out..]`.
    pub weight: Param,
    /// `[out..]`.
    pub bias: Option<Param>,
    pub(super) input: ActivationPoint,
    pub(super) out: ActivationPoint,
    adapter: AdapterSlot,
    num_in: usize,
    num_packed: usize,
}

impl Linear {
    /// A layer from `[.., d_in]` to `[.., d_out]`, with a bias. Weights are initialized uniformly within 1 / sqrt(d_in), biases with
    /// zeros.
    #[must_use]
    pub fn new(d_in: usize, d_out: usize) -> Linear {
        Linear::general(&[d_in], &[d_out])
    }

    /// A layer from `[.., from..]` to `[.., to..]`: `Linear::general(&[d], &[h, c])` projects to heads, `Linear::general(&[h, c], &[d])`
    /// joins heads. Separate dims can be sharded separately. In files the weight is the matrix `[product of from, product of to]`.
    #[doc(alias = "DenseGeneral")]
    #[doc(alias = "LinearGeneral")]
    #[must_use]
    pub fn general(from: &[usize], to: &[usize]) -> Linear {
        let (rows, columns): (usize, usize) = (from.iter().product(), to.iter().product());
        let weight = Param::new(&[from, to].concat())
            .with_file_shape(&[rows, columns])
            .init(Init::Uniform(1.0 / (rows.max(1) as f64).sqrt()));
        Linear {
            weight,
            bias: Some(Param::new(to).with_file_shape(&[columns])),
            input: ActivationPoint::default(),
            out: ActivationPoint::default(),
            adapter: AdapterSlot::default(),
            num_in: from.len(),
            num_packed: 0,
        }
    }

    /// Returns the same layer with another initializer of the weights.
    #[must_use]
    pub fn init(self, init: Init) -> Linear {
        Linear { weight: self.weight.init(init), ..self }
    }

    /// Returns the same layer with a transposed weight in files, `[product of to, product of from]`, as in PyTorch.
    #[must_use]
    pub fn with_transposed_file_shape(self) -> Linear {
        let (ndim, matrix) = (self.weight.shape().len(), self.weight.file_shape());
        let order: Vec<usize> = (self.num_in..ndim).chain(0..self.num_in).collect();
        Linear {
            weight: self.weight.with_file_order(&order).with_file_shape(&[matrix[1], matrix[0]]),
            ..self
        }
    }

    /// Returns the same layer, of whose output dims the first `num_packed` are never sharded: canonical sums over the output dims have
    /// leaves of the next one ([`Deterministic::Mesh`](crate::Deterministic::Mesh)).
    #[must_use]
    pub fn packed_dims(self, num_packed: usize) -> Linear {
        Linear { num_packed, ..self }
    }

    /// Returns the same layer without a bias.
    #[must_use]
    pub fn without_bias(self) -> Linear {
        Linear { bias: None, ..self }
    }

    /// Returns the same layer with a bias initialized with zeros, or without a bias.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Linear {
        let to = &self.weight.shape()[self.num_in..];
        let new = || Param::new(to).with_file_shape(&[to.iter().product()]);
        Linear { bias: bias.then(new), ..self }
    }

    /// Returns x w + b: `[.., from..]` to `[.., to..]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dims of x are not `from`, or if the sharding of the layer does not fit that of x.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.forward_optional_residual(x, None)
    }

    /// Returns residual + (x w + b): `[.., from..]` to `[.., to..]`, the shape of the residual.
    ///
    /// # Panics
    /// As [`Linear::forward`], and if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_with_residual<'a>(&self, x: &Var, residual: impl Into<Residual<'a>>) -> Var {
        self.forward_optional_residual(x, Some(residual.into()))
    }

    #[track_caller]
    pub(super) fn forward_optional_residual(&self, x: &Var, residual: Option<Residual<'_>>) -> Var {
        let (x, weight, bias) = self.operands(x);
        let (residual, branch) = Residual::parts(residual);
        let out = self.adapted_out(&x);
        if self.out.is_watched() {
            // Hooks see the product on every mesh; the kernel adds the bias before the point where the sums are complete.
            let product = x.linear_packed(&weight, (self.num_in, self.num_packed), None, None, &[&out]);
            let y = match &bias {
                Some(bias) => product + bias,
                None => product,
            };
            let y = branch.pass(&y, Location::caller());
            return match residual {
                Some(residual) => residual + y,
                None => y,
            };
        }
        x.linear_packed(&weight, (self.num_in, self.num_packed), bias.as_ref(), residual, &[&out, branch])
    }

    /// Returns x w of a layer without bias and adapter, for the caller's line `site`.
    pub(super) fn product_at(&self, x: &Var, site: &'static Location<'static>) -> Var {
        let x = self.input.constrain_at(x, site);
        let weight = self.weight.on_tape_at(x.tape(), site);
        let num_out = self.weight.shape().len() - self.num_in;
        let op = ops::linear::Linear::new(self.num_in, num_out).with_bias(false);
        let op = op.with_packed_dims(self.num_packed);
        Var::apply_at(Rc::new(op), &[&x, &weight], &[&self.out], site).swap_remove(0)
    }

    /// Returns x after the point `input`, the weight and the bias.
    #[track_caller]
    pub(super) fn operands(&self, x: &Var) -> (Var, Var, Option<Var>) {
        let bias = self.bias_on(x);
        let x = self.input.constrain(x);
        let weight = self.weight.on(&x);
        (x, weight, bias)
    }

    #[track_caller]
    #[expect(clippy::manual_map, reason = "the caller's line would be lost in a closure")]
    pub(super) fn bias_on(&self, x: &Var) -> Option<Var> {
        match &self.bias {
            Some(bias) => Some(bias.on(x)),
            None => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn general_layers_have_the_right_file_shapes() {
        let heads = Linear::general(&[10], &[3, 2, 5]);
        assert_eq!((heads.weight.shape(), heads.weight.file_shape()), (&[10, 3, 2, 5][..], vec![10, 30]));
        let bias = heads.bias.unwrap();
        assert_eq!(
            (bias.shape(), bias.file_shape(), bias.has_weight_decay()),
            (&[3, 2, 5][..], vec![30], false)
        );
        let transposed = Linear::general(&[10], &[3, 2, 5]).with_transposed_file_shape().weight;
        assert_eq!((transposed.shape(), transposed.file_shape()), (&[10, 3, 2, 5][..], vec![30, 10]));
        assert_eq!(Linear::general(&[2, 5], &[10]).weight.initializer(), Init::Uniform(1.0 / 10f64.sqrt()));
    }
}
