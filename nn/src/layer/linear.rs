//! y = x w + b, over one dim or several.

use crate::module;
use crate::param::{Init, Param};
use crate::point::Point;
use shardgrad_autograd::Var;
use shardgrad_tensor::{Value, ops};
use std::rc::Rc;

module! {
    /// y = x w + b. The weight is `[in.., out..]`, the bias `[out..]`.
    ///
    /// Two points: `input`, where x arrives, and `out`. A product whose inputs are split leaves a pending sum at `out`, before
    /// the bias is added, and a plan that states a layout there says into what it is completed. Where no rank holds a part of a
    /// sum, one op adds the bias too, and `out` lies behind it; and behind the residual, if no plan speaks of `out`.
    #[derive(Debug)]
    pub struct Linear {
        /// `[in.., out..]`.
        pub weight: Param,
        /// `[out..]`.
        pub bias: Option<Param>,
        pub(super) input: Point,
        pub(super) out: Point;
        signature: Option<String>,
        num_in: usize,
    }
}

impl Linear {
    /// From `[.., d_in]` to `[.., d_out]`, with a bias. Weights are uniform within 1 / sqrt(d_in), biases zero.
    #[must_use]
    pub fn new(d_in: usize, d_out: usize) -> Linear {
        Linear::shaped(&[d_in], &[d_out])
    }

    /// From `[.., from..]` to `[.., to..]`: `Linear::shaped(&[d], &[h, c])` makes heads, its converse joins them. Dims that
    /// are kept apart can be split apart. In files the weight is the matrix `[product of from, product of to]`.
    #[must_use]
    pub fn shaped(from: &[usize], to: &[usize]) -> Linear {
        let (rows, columns): (usize, usize) = (from.iter().product(), to.iter().product());
        let weight = Param::new(&[from, to].concat())
            .file_shape(&[rows, columns])
            .init(Init::Uniform(1.0 / (rows.max(1) as f64).sqrt()));
        let plain = from.len() == 1 && to.len() == 1;
        Linear {
            weight,
            bias: Some(Param::new(to).file_shape(&[columns])),
            input: Point::default(),
            out: Point::default(),
            num_in: from.len(),
            signature: (!plain).then(|| signature(from.len(), to.len())),
        }
    }

    /// The same layer with other initial weights.
    #[must_use]
    pub fn init(self, init: Init) -> Linear {
        Linear { weight: self.weight.init(init), ..self }
    }

    /// The same layer, whose weight is transposed in files: `[product of to, product of from]`, as PyTorch keeps it.
    #[must_use]
    pub fn transposed_in_files(self) -> Linear {
        let (ndim, matrix) = (self.weight.shape().len(), self.weight.shape_in_files());
        let order: Vec<usize> = (self.num_in..ndim).chain(0..self.num_in).collect();
        Linear { weight: self.weight.file_order(&order).file_shape(&[matrix[1], matrix[0]]), ..self }
    }

    /// The same layer without a bias.
    #[must_use]
    pub fn without_bias(self) -> Linear {
        Linear { bias: None, ..self }
    }

    /// The same layer with a bias that is zero at first, or without one.
    #[must_use]
    pub fn with_bias(self, bias: bool) -> Linear {
        let to = &self.weight.shape()[self.num_in..];
        let new = || Param::new(to).file_shape(&[to.iter().product()]);
        Linear { bias: bias.then(new), ..self }
    }

    /// The same layer, whose weight dim `dim` counts `things` of which every rank must have one at least.
    #[must_use]
    pub fn never_empty(self, dim: usize, things: &'static str) -> Linear {
        Linear { weight: self.weight.never_empty(dim, things), ..self }
    }

    /// `[.., from..]` to `[.., to..]`.
    ///
    /// # Panics
    /// Unwinds with an error if the last dims of x are not `from`, or the plan splits the layer in a way that x does not
    /// allow.
    #[track_caller]
    #[must_use]
    pub fn forward(&self, x: &Var) -> Var {
        self.ended(x, None)
    }

    /// residual + (x w + b), in one pass where nothing happens in between: `[.., from..]` to the shape of the residual, `[.., to..]`.
    ///
    /// # Panics
    /// As [`Linear::forward`], and if the residual cannot be added to what comes out.
    #[track_caller]
    #[must_use]
    pub fn forward_onto(&self, x: &Var, residual: &Var) -> Var {
        self.ended(x, Some(residual))
    }

    #[track_caller]
    pub(super) fn ended(&self, x: &Var, residual: Option<&Var>) -> Var {
        #[expect(clippy::manual_map, reason = "the caller's line would be lost in a closure")]
        let bias = match &self.bias {
            Some(bias) => Some(bias.on(x)),
            None => None,
        };
        let x = self.input.at(x);
        let weight = self.weight.on(&x);
        self.through(&x, &weight, bias.as_ref(), residual)
    }

    /// What has arrived, with the parameters on its tape, to the result of the layer.
    #[track_caller]
    pub(super) fn through(&self, x: &Var, weight: &Var, bias: Option<&Var>, residual: Option<&Var>) -> Var {
        let (num_in, num_out) = (self.num_in, weight.layout().ndim() - self.num_in);
        let is_whole = self.sums_are_whole(x, weight);
        if let Some(residual) = residual
            && is_whole
            && self.ends_with(residual, x, weight)
        {
            let op = Rc::new(ops::linear::Linear::onto(num_in, num_out, bias.is_some()));
            // What happens in the op is told of the place behind the product.
            let x = &self.out.at(x);
            return match bias {
                Some(bias) => Var::apply_one(op, &[x, weight, bias, residual]),
                None => Var::apply_one(op, &[x, weight, residual]),
            };
        }
        let y = match (bias, &self.signature) {
            (Some(bias), _) if is_whole => {
                let op = Rc::new(ops::linear::Linear::new(num_in, num_out));
                self.out.at(&Var::apply_one(op, &[x, weight, bias]))
            }
            (_, None) => self.out.at(&x.matmul(weight)),
            (_, Some(signature)) => self.out.at(&x.einsum(signature, weight)),
        };
        let y = match bias {
            Some(bias) if !is_whole => y.add(bias),
            _ => y,
        };
        match residual {
            Some(residual) => residual.add(&y),
            None => y,
        }
    }

    /// Whether a product of sums that are whole may end with a residual: nothing happens in between, each rank has of the residual
    /// what it has of the result, whose rows are those of x, and the gradients of x and the weight stay in their states.
    pub(super) fn ends_with(&self, residual: &Var, x: &Var, weight: &Var) -> bool {
        let (residual, x, weight) = (residual.layout(), x.layout(), weight.layout());
        let rows = &x.dims()[..x.ndim() - self.num_in];
        let replicate = x.replicate().union(weight.replicate());
        self.out.is_silent()
            && residual.partial().is_empty()
            && residual.dims().split_at_checked(rows.len()) == Some((rows, &weight.dims()[self.num_in..]))
            && residual.replicate().iter().all(|axis| replicate.contains(axis))
    }

    /// Whether no rank holds a part of a sum, so that a bias may be added to what comes out of the product.
    pub(super) fn sums_are_whole(&self, x: &Var, weight: &Var) -> bool {
        let (x, weight) = (x.layout(), weight.layout());
        let Some(first) = x.ndim().checked_sub(self.num_in) else { return false };
        let summed = x.dims()[first..].iter().chain(&weight.dims()[..self.num_in]);
        let whole = summed.into_iter().all(|dim| dim.is_whole());
        whole && x.partial().is_empty() && weight.partial().is_empty()
    }
}

/// `..m i0 i1, i0 i1 o0 -> ..m o0` for two dims in and one out.
fn signature(num_in: usize, num_out: usize) -> String {
    let labels = |letter: char, n: usize| (0..n).map(|i| format!(" {letter}{i}")).collect::<String>();
    let (from, to) = (labels('i', num_in), labels('o', num_out));
    format!("..m{from},{from}{to} -> ..m{to}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_signatures_by_hand() {
        let heads = Linear::shaped(&[10], &[3, 2, 5]);
        assert_eq!(heads.signature.as_deref(), Some("..m i0, i0 o0 o1 o2 -> ..m o0 o1 o2"));
        assert_eq!((heads.weight.shape(), heads.weight.shape_in_files()), (&[10, 3, 2, 5][..], vec![10, 30]));
        let bias = heads.bias.unwrap();
        assert_eq!((bias.shape(), bias.shape_in_files(), bias.decays()), (&[3, 2, 5][..], vec![30], false));
        assert!(Linear::new(4, 6).signature.is_none());
        let turned = Linear::shaped(&[10], &[3, 2, 5]).transposed_in_files().weight;
        assert_eq!((turned.shape(), turned.shape_in_files()), (&[10, 3, 2, 5][..], vec![30, 10]));
        assert_eq!(Linear::shaped(&[2, 5], &[10]).weight.initial(), Init::Uniform(1.0 / 10f64.sqrt()));
    }
}
