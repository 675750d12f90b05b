//! Linear layer: y = x w + b, over one dim or several.

mod adapted;

use crate::module::activation_point::ActivationPoint;
use crate::module::adapter::AdapterSlot;
use crate::module::param::{Init, Param};
use shardgrad_autograd::Var;
use shardgrad_tensor::{Value, ops};
use std::rc::Rc;

/// Linear layer, y = x w + b. The weight is `[in.., out..]`, the bias `[out..]`.
///
/// An adapter ([`Module::adapt`](crate::Module::adapt)) adds its term to x w, before `out`.
///
/// Activation points: `input`, on x, and `out`. With row-parallel weights the product is a partial sum at `out`, before the bias
/// is added; a rule of the plan for `out` states the layout to which the sum is reduced. Without partial sums one op also adds
/// the bias, and `out` follows the bias; without a rule for `out` the same op can also add a residual (epilogue).
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
    signature: Option<String>,
    num_in: usize,
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
        let plain = from.len() == 1 && to.len() == 1;
        Linear {
            weight,
            bias: Some(Param::new(to).with_file_shape(&[columns])),
            input: ActivationPoint::default(),
            out: ActivationPoint::default(),
            adapter: AdapterSlot::default(),
            num_in: from.len(),
            signature: (!plain).then(|| signature(from.len(), to.len())),
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

    /// Returns the same layer, of whose weight dim `dim` every rank must hold a non-empty shard ([`Param::no_empty_shards`]).
    #[must_use]
    pub fn no_empty_shards(self, dim: usize, things: &'static str) -> Linear {
        Linear { weight: self.weight.no_empty_shards(dim, things), ..self }
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

    /// Returns residual + (x w + b), with the addition fused into the epilogue of the product where possible: `[.., from..]` to
    /// `[.., to..]`, the shape of the residual.
    ///
    /// # Panics
    /// As [`Linear::forward`], and if the residual cannot be added to the output.
    #[track_caller]
    #[must_use]
    pub fn forward_with_residual(&self, x: &Var, residual: &Var) -> Var {
        self.forward_optional_residual(x, Some(residual))
    }

    #[track_caller]
    pub(super) fn forward_optional_residual(&self, x: &Var, residual: Option<&Var>) -> Var {
        #[expect(clippy::manual_map, reason = "the caller's line would be lost in a closure")]
        let bias = match &self.bias {
            Some(bias) => Some(bias.on(x)),
            None => None,
        };
        let x = self.input.constrain(x);
        let weight = self.weight.on(&x);
        match self.adapter() {
            Some(adapter) => self.project_adapted(adapter, (&x, &weight), bias.as_ref(), residual),
            None => self.project(&x, &weight, bias.as_ref(), residual),
        }
    }

    /// Computes the layer from x after `input` and the parameters on the tape of x.
    #[track_caller]
    pub(super) fn project(&self, x: &Var, weight: &Var, bias: Option<&Var>, residual: Option<&Var>) -> Var {
        let (num_in, num_out) = (self.num_in, weight.layout().ndim() - self.num_in);
        let has_complete_sums = self.has_complete_sums(x, weight);
        if let Some(residual) = residual
            && has_complete_sums
            && self.can_fuse_residual(residual, x, weight)
        {
            let op = Rc::new(ops::linear::Linear::with_residual(num_in, num_out, bias.is_some()));
            // The profiler attributes the op to the path of `out`.
            let x = &self.out.constrain(x);
            return match bias {
                Some(bias) => Var::apply_one(op, &[x, weight, bias, residual]),
                None => Var::apply_one(op, &[x, weight, residual]),
            };
        }
        let y = match (bias, &self.signature) {
            (Some(bias), _) if has_complete_sums => {
                let op = Rc::new(ops::linear::Linear::new(num_in, num_out));
                self.out.constrain(&Var::apply_one(op, &[x, weight, bias]))
            }
            (_, None) => self.out.constrain(&x.matmul(weight)),
            (_, Some(signature)) => self.out.constrain(&x.einsum(signature, weight)),
        };
        let y = match bias {
            Some(bias) if !has_complete_sums => y.add(bias),
            _ => y,
        };
        match residual {
            Some(residual) => residual.add(&y),
            None => y,
        }
    }

    /// Whether the residual can be fused into the epilogue of a product without partial sums: no rule applies to `out`, the residual
    /// is sharded as the result is, and the fusion does not change the states of the gradients of x and the weight.
    pub(super) fn can_fuse_residual(&self, residual: &Var, x: &Var, weight: &Var) -> bool {
        let (residual, x, weight) = (residual.layout(), x.layout(), weight.layout());
        let rows = &x.dims()[..x.ndim() - self.num_in];
        let replicate = x.replicate().union(weight.replicate());
        self.out.is_unconstrained()
            && residual.partial().is_empty()
            && residual.dims().split_at_checked(rows.len()) == Some((rows, &weight.dims()[self.num_in..]))
            && residual.replicate().iter().all(|axis| replicate.contains(axis))
    }

    /// Whether the product has no partial sums, so that its op can also add the bias.
    pub(super) fn has_complete_sums(&self, x: &Var, weight: &Var) -> bool {
        let (x, weight) = (x.layout(), weight.layout());
        let Some(first) = x.ndim().checked_sub(self.num_in) else { return false };
        let summed = x.dims()[first..].iter().chain(&weight.dims()[..self.num_in]);
        let whole = summed.into_iter().all(|dim| dim.is_unsharded());
        whole && x.partial().is_empty() && weight.partial().is_empty()
    }
}

/// Einsum signature of a layer, such as `..m i0 i1, i0 i1 o0 -> ..m o0` for two dims in and one out.
fn signature(num_in: usize, num_out: usize) -> String {
    let labels = |letter: char, n: usize| (0..n).map(|i| format!(" {letter}{i}")).collect::<String>();
    let (from, to) = (labels('i', num_in), labels('o', num_out));
    format!("..m{from},{from}{to} -> ..m{to}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn general_layers_have_the_right_signatures_and_file_shapes() {
        let heads = Linear::general(&[10], &[3, 2, 5]);
        assert_eq!(heads.signature.as_deref(), Some("..m i0, i0 o0 o1 o2 -> ..m o0 o1 o2"));
        assert_eq!((heads.weight.shape(), heads.weight.file_shape()), (&[10, 3, 2, 5][..], vec![10, 30]));
        let bias = heads.bias.unwrap();
        assert_eq!(
            (bias.shape(), bias.file_shape(), bias.has_weight_decay()),
            (&[3, 2, 5][..], vec![30], false)
        );
        assert!(Linear::new(4, 6).signature.is_none());
        let transposed = Linear::general(&[10], &[3, 2, 5]).with_transposed_file_shape().weight;
        assert_eq!((transposed.shape(), transposed.file_shape()), (&[10, 3, 2, 5][..], vec![30, 10]));
        assert_eq!(Linear::general(&[2, 5], &[10]).weight.initializer(), Init::Uniform(1.0 / 10f64.sqrt()));
    }
}
