//! The memory traffic of GPU kernels: how much of the sectors that a warp loads and stores it uses, and how many passes over the banks of
//! shared memory its accesses take. Each kernel has a floor; a change that falls below it is slower on every GPU.

use crate::dtype::DType;
use crate::gpu::shim;
use crate::gpu::{Grid, GridArg};
use crate::kernel::{Bound, GpuCode, Kernel, Scalar};
use crate::op::kernel_check::{Case, Kind, values};
use crate::op::{
    attention, batched_matmul, binary, copy, cross_entropy, embedding, grouped_matmul, layer_norm, reduce,
    rms_norm, softmax, sort, swiglu, unary,
};
use crate::strides::Strides;
use std::fmt::Write as _;

/// Limits of one grid: the least used share of loaded and of stored sectors, and the most passes over banks per pass that is needed.
type Limits = (&'static str, f64, f64, f64);

/// Compares the traffic of each grid with its limits; returns what is beyond.
fn beyond(case: &Case<'_>, dtype: DType, name: &str, limits: &[Limits]) -> String {
    let (mut text, found) = (String::new(), case.memory_traffic(dtype));
    for (entry, traffic) in &found {
        let (loads, stores, conflicts) =
            (traffic.load_efficiency(), traffic.store_efficiency(), traffic.bank_conflicts());
        let limit = limits.iter().find(|limit| limit.0 == *entry);
        let fits = limit.is_some_and(|&(_, l, s, c)| loads >= l && stores >= s && conflicts <= c);
        if !fits {
            writeln!(
                text,
                "{name} {dtype}: (\"{entry}\", {loads:.3}, {stores:.3}, {conflicts:.3}), limits {limit:?}"
            )
            .unwrap();
        }
    }
    text
}

const INDEX: Kind = Kind::Fixed(DType::I64);

/// A norm's backward with a residual gradient, with or without a mean.
fn norm_gradient(kernel: &'static Kernel, statistics: usize, [rows, d]: [usize; 2]) -> Case<'static> {
    let (shape, dw) = ([rows, d], statistics);
    let mut case = Case::new(kernel).input(&shape, &values(4, rows * d)).input(&[d], &values(5, d));
    for i in 0..statistics {
        case = case.input_as(Kind::Accumulator, &[rows], &values(6 + i as u64, rows));
    }
    case = case.input(&shape, &values(8, rows * d)).input(&shape, &values(9, rows * d)).output(&shape);
    (0..dw).fold(case, |case, _| case.output(&[d]))
}

fn heads([b, t, g, c]: [usize; 4]) -> Vec<f64> {
    values(7, b * t * g * c)
}

/// The rows of models on aligned memory.
#[test]
fn kernels_use_the_memory_that_they_load() {
    if !shim::compiler_is_found() {
        return;
    }
    let [rows, d, v] = [40, 768, 1000];
    let (x, dy, shape) = (values(1, rows * d), values(2, rows * d), [rows, d]);
    let index: Vec<f64> = (0..rows).map(|i| (i * i * 7 % v) as f64).collect();
    let rows_of = |kernel: &'static Kernel| Case::new(kernel).input(&shape, &x);
    let two = |kernel: &'static Kernel| rows_of(kernel).input(&shape, &dy).output(&shape);
    let whole = |entry| [(entry, 0.99, 0.99, 1.0)];
    let transposed = Strides::contiguous(&[256, 128]).permute(&[1, 0]);
    let of_vocabulary = [Scalar::Int(0), Scalar::Int(v as i64)];
    let logits = values(3, 8 * v);
    let targets: Vec<f64> = (0..8).map(|i| (i * 100) as f64).collect();
    let (q, k, scale) = ([1, 256, 2, 2, 64], [1, 256, 2, 64], [0.1, 1.0]);
    let attention_scalars = [Scalar::Real(scale[0]), Scalar::Int(1), Scalar::Int(0), Scalar::Int(0)];
    let of_heads = |shape: &[usize]| heads([1, shape[1], shape[2], shape[3..].iter().product()]);
    let starts = [0.0, 40.0, 128.0];
    let grouped = |kernel: &'static Kernel| {
        Case::new(kernel).input(&[128, 96], &values(1, 128 * 96)).scalars(&[Scalar::Int(2)])
    };
    let mut text = String::new();
    let mut check = |case: Case<'_>, name: &str, limits: &[Limits]| {
        text += &beyond(&case, DType::BF16, name, limits);
    };
    check(rows_of(&copy::COPY).output(&shape), "copy", &whole("copy"));
    let case = Case::new(&copy::COPY).input_view(Kind::Tested, transposed, &values(1, 256 * 128));
    check(case.output(&[128, 256]), "transposed copy", &whole("transpose"));
    check(two(&binary::ADD), "add", &whole("map"));
    check(rows_of(&unary::GELU).output(&shape), "gelu", &whole("map"));
    let swiglu_gradient = two(&swiglu::BACKWARD).input(&shape, &values(5, rows * d)).output(&shape);
    check(swiglu_gradient, "swiglu gradient", &whole("swiglu_backward"));
    let norm =
        rows_of(&layer_norm::FORWARD).input(&[d], &values(2, d)).input(&[d], &values(3, d)).output(&shape);
    let norm = norm.output_as(Kind::Accumulator, &[rows]).output_as(Kind::Accumulator, &[rows]);
    check(norm.scalars(&[Scalar::Real(1e-5)]), "layer_norm", &[("normalize", 0.99, 0.96, 1.0)]);
    // Lanes store eight sums each at the end of a block: seven of eight passes over the banks are waits.
    let limits = [("normalize_backward", 0.99, 0.99, 4.5), ("add_parts", 0.99, 0.99, 1.0)];
    check(norm_gradient(&layer_norm::BACKWARD, 2, shape), "layer_norm gradient", &limits);
    check(norm_gradient(&rms_norm::BACKWARD, 1, shape), "rms_norm gradient", &limits);
    check(rows_of(&softmax::FORWARD).output(&shape), "softmax", &whole("softmax"));
    check(two(&softmax::BACKWARD), "softmax gradient", &whole("softmax_backward"));
    let case = Case::new(&cross_entropy::FORWARD).input(&[8, v], &logits).input_as(INDEX, &[8], &targets);
    let case = case.output_as(Kind::Accumulator, &[8]).output_as(Kind::Accumulator, &[8]);
    check(case.scalars(&of_vocabulary), "cross_entropy", &[("cross_entropy", 0.92, 0.12, 1.0)]);
    let of_rows = |case: Case<'static>| {
        (0..3).fold(case, |case, i| case.input_as(Kind::Accumulator, &[8], &values(4 + i, 8)))
    };
    let case = of_rows(Case::new(&cross_entropy::BACKWARD).input_as(INDEX, &[8], &targets));
    let case = case.output_view(Kind::Tested, Strides::contiguous(&[8, v]), &logits);
    check(
        case.scalars(&of_vocabulary),
        "cross_entropy gradient",
        &[("cross_entropy_backward", 0.91, 0.96, 1.0)],
    );
    let case =
        Case::new(&embedding::FORWARD).input(&[v, d], &values(1, v * d)).input_as(INDEX, &[rows], &index);
    check(case.output(&[rows, d]).scalars(&of_vocabulary), "embedding", &[("gather", 0.95, 0.99, 1.0)]);
    // Eight tokens for each row; the starts of rows are found by binary search.
    let tokens: Vec<f64> = (0..400).map(|i| (i * 7 % 50) as f64).collect();
    let case = Case::new(&embedding::BACKWARD)
        .input_as(INDEX, &[400], &tokens)
        .input(&[400, d], &values(6, 400 * d));
    let case = case.output(&[50, d]).scalars(&[Scalar::Int(0), Scalar::Int(50)]);
    let limits = [("tiles", 0.12, 0.99, 4.0), ("find_starts", 0.2, 0.9, 1.0), ("sum_tokens", 0.9, 0.99, 1.0)];
    check(case, "embedding gradient", &limits);
    let sum = rows_of(&reduce::SUM).scalars(&[Scalar::Int(1), Scalar::Real(1.0)]);
    check(sum.output(&[rows]), "sum of rows", &[("reduce_rows", 0.99, 0.25, 1.0)]);
    let columns = Strides::contiguous(&shape).permute(&[1, 0]);
    let sum = Case::new(&reduce::SUM).input_view(Kind::Tested, columns, &x);
    check(
        sum.scalars(&[Scalar::Int(1), Scalar::Real(1.0)]).output(&[d]),
        "sum of columns",
        &[("reduce_columns", 0.99, 0.99, 4.5)],
    );
    let (forward, backward) = (Case::new(&attention::FORWARD), Case::new(&attention::BACKWARD));
    let operands =
        |case: Case<'static>| case.input(&q, &of_heads(&q)).input(&k, &of_heads(&k)).input(&k, &of_heads(&k));
    let case = operands(forward).output(&q).output_as(Kind::Accumulator, &q[..4]).scalars(&attention_scalars);
    check(case, "attention", &[("forward", 0.9, 0.9, 1.0)]);
    let case =
        operands(backward).input(&q, &of_heads(&q)).input_as(Kind::Accumulator, &q[..4], &values(1, 1024));
    let case = case.input(&q, &of_heads(&q)).output(&q).output(&k).output(&k).scalars(&attention_scalars);
    let limits = [
        ("row_deltas", 0.98, 0.5, 1.0),
        ("backward_keys", 0.9, 0.9, 1.1),
        ("backward_queries", 0.9, 0.9, 1.1),
    ];
    check(case, "attention gradient", &limits);
    let case = grouped(&grouped_matmul::FORWARD).input(&[2, 96, 128], &values(2, 2 * 96 * 128));
    check(case.input_as(INDEX, &[3], &starts).output(&[128, 128]), "experts", &[("product", 0.9, 0.9, 1.1)]);
    let case = grouped(&grouped_matmul::WEIGHT_GRAD).input(&[128, 128], &values(2, 128 * 128));
    check(
        case.input_as(INDEX, &[3], &starts).output(&[2, 96, 128]),
        "gradient of experts",
        &[("gradient", 0.9, 0.9, 1.1)],
    );
    let case = Case::new(&batched_matmul::TILED_MATMUL).input(&[1, 64, 96], &values(1, 64 * 96));
    check(
        case.input(&[1, 96, 128], &values(2, 96 * 128)).output(&[1, 64, 128]),
        "tiled product",
        &[("tiled", 0.9, 0.9, 1.1)],
    );
    let case = Case::new(&sort::SORT).input(&[4, 2048], &values(1, 4 * 2048)).output(&[4, 2048]);
    check(
        case.output_as(INDEX, &[4, 2048]).scalars(&[Scalar::Int(0)]),
        "sort",
        &[("tiles_last", 0.13, 0.99, 2.0)],
    );
    assert!(text.is_empty(), "beyond the limits:\n{text}");
}

/// y = x through shared memory: along a column of x, and with the threads of a warp in one bank.
static COLUMNS: Kernel = Kernel {
    name: "columns",
    reference: |_, _| unreachable!("only the GPU runs it"),
    cpu: None,
    gpu: Some(GpuCode {
        source: "extern \"C\" __global__ void columns(const float *x, float *y) {\n\
                __shared__ float tile[1024];\n\
                tile[threadIdx.x * 32] = x[threadIdx.x * 32];\n\
                __syncwarp();\n\
                y[threadIdx.x] = tile[threadIdx.x * 32];\n\
            }\n",
        plan: |_, plan| {
            let (args, defines, blocks) = (vec![GridArg::Input(0), GridArg::Output(0)], Vec::new(), [1; 3]);
            plan.grid(Grid { entry: "columns", defines, blocks, threads: 32, shared_bytes: 0, args });
            Ok(())
        },
    }),
    flops: |_| 0,
    bytes: None,
    bound: Bound { ulps: 0.0 },
};

#[test]
fn scattered_loads_and_bank_conflicts_are_counted() {
    if !shim::compiler_is_found() {
        return;
    }
    let case = Case::new(&COLUMNS).input(&[1024], &values(1, 1024)).output(&[32]);
    let (entry, traffic) = case.memory_traffic(DType::F32)[0];
    let counted = (traffic.load_efficiency(), traffic.store_efficiency(), traffic.bank_conflicts());
    assert_eq!((entry, counted), ("columns", (0.125, 1.0, 32.0)));
    let limits = [("columns", 0.2, 0.9, 40.0)];
    assert!(beyond(&case, DType::F32, "columns", &limits).contains("limits"));
    assert!(beyond(&case, DType::F32, "columns", &[("columns", 0.1, 0.9, 40.0)]).is_empty());
}
