//! Memory-bound kernel cases, for all devices.

use super::kernel_case::{KernelCase, OperandLayout};
use shardgrad::kernels::op::{
    adamw, binary, copy, cross_entropy, embedding, gated_scan, layer_norm, reduce, rms_norm, rope, softmax,
    swiglu, unary,
};
use shardgrad::kernels::{DType, Kernel, Scalar};

use DType::{F32, F64, I64};

/// Operand sizes and dtype.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Dtype of all operands except those of the optimizer and statistics per row.
    pub(super) dtype: DType,
    /// Rows and width of activations.
    pub(super) rows: [usize; 2],
    /// Rows and columns of the transposed matrix.
    pub(super) side: usize,
    /// Batch, tokens, heads and head size of rotary embeddings.
    pub(super) heads: [usize; 4],
    /// Rows and width of the hidden layer of an MLP.
    pub(super) hidden: [usize; 2],
    /// Rows of logits, and vocabulary size.
    pub(super) logits: [usize; 2],
    /// Number of parameters of the optimizer.
    pub(super) parameters: usize,
}

impl Sizes {
    /// Returns small and odd sizes for correctness checks.
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

    /// Returns the kernels of a training step except matmuls and attention.
    pub(super) fn cases(&self) -> Vec<KernelCase> {
        let mut cases = [self.elements(), self.norms(), self.reductions(), self.tokens()].concat();
        let d = self.dtype;
        cases.iter_mut().for_each(|case| case.name = case.name.replace("{}", &d.to_string()));
        cases.extend(self.optimizer());
        cases
    }

    /// Returns an elementwise case: `I` inputs and one output of the same shape.
    fn elementwise<const I: usize>(&self, name: &str, kernel: &'static Kernel) -> KernelCase {
        KernelCase::new(name, kernel, [(self.dtype, &self.rows[..]); I], [(self.dtype, &self.rows[..])], &[])
    }

    /// Copies, elementwise arithmetic, rotary embeddings.
    fn elements(&self) -> Vec<KernelCase> {
        let (d, x, width) = (self.dtype, &self.rows[..], &self.rows[1..]);
        let (square, half) = ([self.side; 2], self.heads[3] / 2);
        let angle = |i: usize| Scalar::Real(1e4f64.powf(-(i as f64) / half as f64));
        let angles: Vec<Scalar> = std::iter::once(Scalar::Int(0)).chain((0..half).map(angle)).collect();
        let transpose = format!("transpose {{}} {0}x{0}", self.side);
        let hidden = (d, &self.hidden[..]);
        vec![
            self.elementwise::<1>("copy {}", &copy::COPY),
            match d {
                F32 => KernelCase::new("cast f32 to bf16", &copy::COPY, [(d, x)], [(DType::BF16, x)], &[]),
                _ => KernelCase::new("cast {} to f32", &copy::COPY, [(d, x)], [(F32, x)], &[]),
            },
            KernelCase::new(&transpose, &copy::COPY, [(d, &square)], [(d, &square)], &[])
                .with_layout(0, OperandLayout::Transposed),
            self.elementwise::<2>("add {}", &binary::ADD),
            KernelCase::new("add row {}", &binary::ADD, [(d, x), (d, width)], [(d, x)], &[])
                .with_layout(1, OperandLayout::Broadcast(self.rows[0])),
            self.elementwise::<1>("gelu {}", &unary::GELU),
            self.elementwise::<2>("gelu gradient {}", &unary::GELU_GRAD),
            KernelCase::new("rope {}", &rope::ROPE, [(d, &self.heads)], [(d, &self.heads)], &angles),
            KernelCase::new("swiglu gradient {}", &swiglu::BACKWARD, [hidden; 3], [hidden; 2], &[]),
        ]
    }

    /// Norms and their gradients, with saved statistics.
    fn norms(&self) -> Vec<KernelCase> {
        let (d, eps) = (self.dtype, [Scalar::Real(1e-5)]);
        let (x, w, row) = ((d, &self.rows[..]), (d, &self.rows[1..]), (F32, &self.rows[..1]));
        let back = &layer_norm::BACKWARD;
        let rms_back = &rms_norm::BACKWARD;
        vec![
            KernelCase::new("layer_norm {}", &layer_norm::FORWARD, [x, w, w], [x, row, row], &eps),
            KernelCase::new("layer_norm gradient {}", back, [x, w, row, row, x], [x, w, w], &[]),
            KernelCase::new(
                "layer_norm gradient {}, with a residual",
                back,
                [x, w, row, row, x, x],
                [x, w, w],
                &[],
            ),
            KernelCase::new("rms_norm {}", &rms_norm::FORWARD, [x, w], [x, row], &eps),
            KernelCase::new("rms_norm gradient {}", rms_back, [x, w, row, x], [x, w], &[]),
            KernelCase::new(
                "rms_norm gradient {}, with a residual",
                rms_back,
                [x, w, row, x, x],
                [x, w],
                &[],
            ),
        ]
    }

    /// Softmax, reductions and recurrences along the rows.
    fn reductions(&self) -> Vec<KernelCase> {
        let (d, [rows, width]) = (self.dtype, self.rows);
        let (x, w, row) = ((d, &self.rows[..]), (d, &self.rows[1..]), (d, &self.rows[..1]));
        let (z, of, columns) = ((d, &self.logits[..]), (d, &self.logits[..1]), [width, rows]);
        let last = [Scalar::Int(1), Scalar::Real(1.0)];
        let steps = (d, &[rows, width, 1][..]);
        vec![
            self.elementwise::<1>("softmax {}", &softmax::FORWARD),
            self.elementwise::<2>("softmax gradient {}", &softmax::BACKWARD),
            KernelCase::new("sum of rows {}", &reduce::SUM, [x], [row], &last),
            KernelCase::new("sum of columns {}", &reduce::SUM, [(d, &columns)], [w], &last)
                .with_layout(0, OperandLayout::Transposed),
            KernelCase::new("max of rows {}, vocabulary", &reduce::MAX, [z], [of], &last[..1]),
            KernelCase::new("gated_scan {}", &gated_scan::SCAN, [steps; 2], [steps], &[Scalar::Int(0)]),
            KernelCase::new("gated_scan gradient {}", &gated_scan::BACKWARD, [steps; 3], [steps; 2], &[]),
        ]
    }

    /// Embedding and cross entropy.
    fn tokens(&self) -> Vec<KernelCase> {
        let (d, [_, kinds]) = (self.dtype, self.logits);
        let (x, token) = ((d, &self.rows[..]), (I64, &self.rows[..1]));
        let (z, label, term) = ((d, &self.logits[..]), (I64, &self.logits[..1]), (F32, &self.logits[..1]));
        let table = [kinds, self.rows[1]];
        let part = [Scalar::Int(0), Scalar::Int(kinds as i64)];
        let cases = vec![
            KernelCase::new("cross_entropy {}", &cross_entropy::FORWARD, [z, label], [term, term], &part),
            KernelCase::new("embedding {}", &embedding::FORWARD, [(d, &table), token], [x], &part),
            KernelCase::new("embedding gradient {}", &embedding::BACKWARD, [token, x], [(d, &table)], &part),
            KernelCase::new(
                "cross_entropy gradient {}",
                &cross_entropy::BACKWARD,
                [label, term, term, term],
                [z],
                &part,
            ),
        ];
        cases.into_iter().map(|case| case.with_tokens(kinds)).collect()
    }

    /// The optimizer.
    fn optimizer(&self) -> Vec<KernelCase> {
        let all = (F32, &[self.parameters][..]);
        let (rates, gate) = ((F64, &[1, adamw::NUM_RATES][..]), (F64, &[2][..]));
        vec![
            KernelCase::new("adamw f32", &adamw::STEP, [all, rates, gate], [all; 3], &[Scalar::Int(0)]),
            KernelCase::new("sum of squares f32", &reduce::SUM_SQUARES, [all], [(F64, &[])], &[]),
        ]
    }
}
