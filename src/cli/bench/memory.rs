//! Kernels that should take as long as their bytes need: one list for every device.

use super::case::{Case, Form};
use shardgrad::kernels::op::{
    adamw, binary, copy, cross_entropy, embedding, layer_norm, reduce, rms_norm, rope, softmax, swiglu, unary,
};
use shardgrad::kernels::{DType, Kernel, Scalar};

use DType::{F32, F64, I64};

/// How large the operands are, and of which dtype.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Of all but the optimizer's operands, and of sums over rows.
    pub(super) dtype: DType,
    /// Rows and width of activations.
    pub(super) rows: [usize; 2],
    /// Rows and columns of what is turned.
    pub(super) side: usize,
    /// Batch, tokens, heads and channels of what is rotated.
    pub(super) heads: [usize; 4],
    /// Rows and width of the hidden layer of an mlp.
    pub(super) hidden: [usize; 2],
    /// Rows of logits, and kinds of tokens.
    pub(super) logits: [usize; 2],
    /// Parameters that the optimizer steps at once.
    pub(super) parameters: usize,
}

impl Sizes {
    /// A few of each, as odd as the kernels take them.
    pub(super) fn small(self) -> Sizes {
        Sizes {
            rows: [37, 250],
            side: 97,
            heads: [2, 5, 3, 128],
            hidden: [21, 387],
            logits: [19, 1003],
            parameters: 10_001,
            ..self
        }
    }

    /// The kernels of a training step at these sizes, products and attention left out.
    pub(super) fn cases(&self) -> Vec<Case> {
        let mut cases = [self.elements(), self.norms(), self.reductions(), self.tokens()].concat();
        let d = self.dtype;
        cases.iter_mut().for_each(|case| case.name = case.name.replace("{}", &d.to_string()));
        cases.extend(self.optimizer());
        cases
    }

    /// A kernel of activations alone: so many inputs, one output, all alike.
    fn alike<const I: usize>(&self, name: &str, kernel: &'static Kernel) -> Case {
        Case::new(name, kernel, [(self.dtype, &self.rows[..]); I], [(self.dtype, &self.rows[..])], &[])
    }

    /// Copies, arithmetic, rotations.
    fn elements(&self) -> Vec<Case> {
        let (d, x, width) = (self.dtype, &self.rows[..], &self.rows[1..]);
        let (square, half) = ([self.side; 2], self.heads[3] / 2);
        let angle = |i: usize| Scalar::Real(1e4f64.powf(-(i as f64) / half as f64));
        let angles: Vec<Scalar> = std::iter::once(Scalar::Int(0)).chain((0..half).map(angle)).collect();
        let turn = format!("turn {{}} {0}x{0}", self.side);
        let hidden = (d, &self.hidden[..]);
        vec![
            self.alike::<1>("copy {}", &copy::COPY),
            match d {
                F32 => Case::new("cast f32 to bf16", &copy::COPY, [(d, x)], [(DType::BF16, x)], &[]),
                _ => Case::new("cast {} to f32", &copy::COPY, [(d, x)], [(F32, x)], &[]),
            },
            Case::new(&turn, &copy::COPY, [(d, &square)], [(d, &square)], &[]).lying(0, Form::Turned),
            self.alike::<2>("add {}", &binary::ADD),
            Case::new("add row {}", &binary::ADD, [(d, x), (d, width)], [(d, x)], &[])
                .lying(1, Form::Repeated(self.rows[0])),
            self.alike::<1>("gelu {}", &unary::GELU),
            self.alike::<2>("gelu gradient {}", &unary::GELU_GRAD),
            Case::new("rope {}", &rope::ROTATE, [(d, &self.heads)], [(d, &self.heads)], &angles),
            Case::new("swiglu gradient {}", &swiglu::BACKWARD, [hidden; 3], [hidden; 2], &[]),
        ]
    }

    /// Norms, with what they read of the pass forward.
    fn norms(&self) -> Vec<Case> {
        let (d, eps) = (self.dtype, [Scalar::Real(1e-5)]);
        let (x, w, row) = ((d, &self.rows[..]), (d, &self.rows[1..]), (F32, &self.rows[..1]));
        let back = &layer_norm::BACKWARD;
        let rms_back = &rms_norm::BACKWARD;
        vec![
            Case::new("layer_norm {}", &layer_norm::FORWARD, [x, w, w], [x, row, row], &eps),
            Case::new("layer_norm gradient {}", back, [x, w, row, row, x], [x, w, w], &[]),
            Case::new(
                "layer_norm gradient {}, with a residual",
                back,
                [x, w, row, row, x, x],
                [x, w, w],
                &[],
            ),
            Case::new("rms_norm {}", &rms_norm::FORWARD, [x, w], [x, row], &eps),
            Case::new("rms_norm gradient {}", rms_back, [x, w, row, x], [x, w], &[]),
            Case::new("rms_norm gradient {}, with a residual", rms_back, [x, w, row, x, x], [x, w], &[]),
        ]
    }

    /// Softmax, sums, maxima.
    fn reductions(&self) -> Vec<Case> {
        let (d, [rows, width]) = (self.dtype, self.rows);
        let (x, w, row) = ((d, &self.rows[..]), (d, &self.rows[1..]), (d, &self.rows[..1]));
        let (z, of, columns) = ((d, &self.logits[..]), (d, &self.logits[..1]), [width, rows]);
        let last = [Scalar::Int(1), Scalar::Real(1.0)];
        vec![
            self.alike::<1>("softmax {}", &softmax::FORWARD),
            self.alike::<2>("softmax gradient {}", &softmax::BACKWARD),
            Case::new("sum of rows {}", &reduce::SUM, [x], [row], &last),
            Case::new("sum of columns {}", &reduce::SUM, [(d, &columns)], [w], &last).lying(0, Form::Turned),
            Case::new("max of rows {}, vocabulary", &reduce::MAX, [z], [of], &last[..1]),
        ]
    }

    /// Where tokens come in and where they are compared.
    fn tokens(&self) -> Vec<Case> {
        let (d, [_, kinds]) = (self.dtype, self.logits);
        let (x, token) = ((d, &self.rows[..]), (I64, &self.rows[..1]));
        let (z, label, term) = ((d, &self.logits[..]), (I64, &self.logits[..1]), (F32, &self.logits[..1]));
        let table = [kinds, self.rows[1]];
        let part = [Scalar::Int(0), Scalar::Int(kinds as i64)];
        let cases = vec![
            Case::new("cross_entropy {}", &cross_entropy::TERMS, [z, label], [term, term], &part),
            Case::new("embedding {}", &embedding::FORWARD, [(d, &table), token], [x], &part),
            Case::new("embedding gradient {}", &embedding::BACKWARD, [token, x], [(d, &table)], &part),
            Case::new(
                "cross_entropy gradient {}",
                &cross_entropy::BACKWARD,
                [label, term, term, term],
                [z],
                &part,
            ),
        ];
        cases.into_iter().map(|case| case.of_tokens(kinds)).collect()
    }

    /// What a step does with all parameters.
    fn optimizer(&self) -> Vec<Case> {
        let all = (F32, &[self.parameters][..]);
        let (rates, gate) = ((F64, &[1, adamw::NUM_RATES][..]), (F64, &[2][..]));
        vec![
            Case::new("adamw f32", &adamw::STEP, [all, rates, gate], [all; 3], &[Scalar::Int(0)]),
            Case::new("sum of squares f32", &reduce::SUM_SQUARES, [all], [(F64, &[])], &[]),
        ]
    }
}
