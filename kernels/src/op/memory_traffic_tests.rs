//! The memory traffic of GPU kernels: the sectors of memory that warps load and store, and the passes over the banks of shared memory. The
//! floor of a launch follows from its shapes: the bytes that must move, in sectors of 32 bytes. A kernel may exceed it by a stated factor,
//! for a stated reason; a change that exceeds the factor is slower on every GPU.

use crate::dtype::DType;
use crate::gpu::shim;
use crate::gpu::{Grid, GridArg};
use crate::kernel::{Bound, GpuCode, Kernel, Scalar};
use crate::op::kernel_check::{Case, Kind, values};
use crate::op::linear::MATMUL_GELU_GRAD;
use crate::op::{
    adamw, attention, batched_matmul, binary, copy, cross_entropy, embedding, grouped_matmul, layer_norm,
    reduce, rms_norm, rope, softmax, sort, swiglu, unary,
};
use crate::strides::Strides;
use std::fmt::Write as _;

/// Bytes of a sector of memory.
const SECTOR: usize = 32;

/// The limits of a launch, all grids together.
#[derive(Clone, Copy, Debug)]
struct Limits<'a> {
    /// The bytes that must be loaded and stored, unless they are those of all inputs and all outputs.
    floor: Option<[usize; 2]>,
    /// How often these are loaded and stored at most.
    loads: f64,
    stores: f64,
    /// The most passes over banks per pass that is needed, for each grid that has bank conflicts.
    conflicts: &'a [(&'static str, f64)],
}

/// For the rounding of limits.
const ROUNDING: f64 = 1e-9;

/// Each byte once, and no bank conflict.
const ONCE: Limits<'static> = Limits { floor: None, loads: 1.0, stores: 1.0, conflicts: &[] };

/// Compares the traffic of a launch with its limits; returns what is beyond.
fn beyond(case: &Case<'_>, dtype: DType, name: &str, limits: &Limits<'_>) -> String {
    let (mut text, grids) = (String::new(), case.memory_traffic(dtype));
    let sum = |count: fn(&shim::Traffic) -> u64| grids.iter().map(|(_, traffic)| count(traffic)).sum::<u64>();
    let sectors = [sum(|traffic| traffic.loaded_sectors), sum(|traffic| traffic.stored_sectors)];
    let floor = limits.floor.unwrap_or_else(|| case.operand_bytes(dtype));
    for (what, moved, bytes, most) in
        [("loads", sectors[0], floor[0], limits.loads), ("stores", sectors[1], floor[1], limits.stores)]
    {
        let least = bytes.div_ceil(SECTOR);
        let times = moved as f64 / least as f64;
        if times > most + ROUNDING {
            writeln!(
                text,
                "{name} {dtype}: {what} {moved} sectors, {times:.3} times {least}, at most {most}"
            )
            .unwrap();
        }
    }
    for (entry, traffic) in &grids {
        let passes = traffic.shared_passes as f64 / traffic.shared_passes_least.max(1) as f64;
        let most =
            limits.conflicts.iter().find(|(limited, _)| limited == entry).map_or(1.0, |(_, most)| *most);
        if passes > most + ROUNDING {
            writeln!(
                text,
                "{name} {dtype}: {entry} takes {passes:.3} passes over banks for one, at most {most}"
            )
            .unwrap();
        }
    }
    text
}

const INDEX: Kind = Kind::Fixed(DType::I64);
const F64: Kind = Kind::Fixed(DType::F64);

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
    for dtype in [DType::BF16, DType::F32] {
        let e = dtype.size();
        let size = e as f64;
        // Of two passes over shared memory, one stores the sums of a thread, whose columns are as many as are loaded at once.
        let one_way = (16.0 / size + 1.0) / 2.0;
        let mut check = |case: Case<'_>, name: &str, limits: Limits<'_>| {
            text += &beyond(&case, dtype, name, &limits);
        };
        check(rows_of(&copy::COPY).output(&shape), "copy", ONCE);
        let case = Case::new(&copy::COPY).input_view(Kind::Tested, transposed.clone(), &values(1, 256 * 128));
        check(case.output(&[128, 256]), "transposed copy", ONCE);
        check(two(&binary::ADD), "add", ONCE);
        // The bias of a linear layer, where the library refuses it as an epilogue.
        let bias = Strides::new(shape[..].into(), [0, 1][..].into(), 0);
        let case = rows_of(&binary::ADD).input_view(Kind::Tested, bias, &values(2, d)).output(&shape);
        // Each row loads the bias again.
        let floor = Some([(rows + 1) * d * e, rows * d * e]);
        check(case, "add bias", Limits { floor, loads: 2.0, ..ONCE });
        check(rows_of(&unary::GELU).output(&shape), "gelu", ONCE);
        let swiglu_gradient = two(&swiglu::BACKWARD).input(&shape, &values(5, rows * d)).output(&shape);
        check(swiglu_gradient, "swiglu gradient", ONCE);
        // Gradients through gelu and bias: the product is the library's, and stored before.
        let case = Case::new(&MATMUL_GELU_GRAD).input(&[1, 300, 8], &values(1, 300 * 8));
        let case = case.input(&[1, 8, 256], &values(2, 8 * 256)).input(&[1, 300, 256], &values(3, 300 * 256));
        // Two blocks of rows store and load sums in f32.
        let floor = Some([2 * 300 * 256 * e, (300 + 1) * 256 * e]);
        check(
            case.output(&[1, 300, 256]).output(&[256]),
            "gelu and bias gradient",
            Limits {
                floor,
                loads: 1.0 + 8.0 / (600.0 * size),
                stores: 1.0 + 8.0 / (301.0 * size),
                conflicts: &[("gelu_bias_backward", one_way)],
            },
        );
        let norm = rows_of(&layer_norm::FORWARD).input(&[d], &values(2, d)).input(&[d], &values(3, d));
        let norm =
            norm.output(&shape).output_as(Kind::Accumulator, &[rows]).output_as(Kind::Accumulator, &[rows]);
        // Each row loads weight and bias again, and stores two numbers in sectors of their own.
        let stores = 1.0 + 2.0 * 32.0 / (d as f64 * size);
        let limits = Limits { loads: 3.0, stores, ..ONCE };
        check(norm.scalars(&[Scalar::Real(1e-5)]), "layer_norm", limits);
        // Each row loads the weight twice beside its three operands. With so few rows, each block has one row of each of its four warps,
        // or of all its threads in f32, and stores sums in f32, which are loaded again: in f32 number by number, each time all sectors.
        for (kernel, name, sums) in [
            (&layer_norm::BACKWARD, "layer_norm gradient", 2.0),
            (&rms_norm::BACKWARD, "rms_norm gradient", 1.0),
        ] {
            let [loaded, stored] = if e == 2 { [sums / 2.0; 2] } else { [sums, 4.0 * sums] };
            let (loads, stores) = ((3.0 + 2.0 + loaded) / 3.0, 1.0 + stored);
            let limits = Limits { loads, stores, conflicts: &[("normalize_backward", one_way)], ..ONCE };
            check(norm_gradient(kernel, sums as usize, shape), name, limits);
        }
        check(rows_of(&softmax::FORWARD).output(&shape), "softmax", ONCE);
        check(two(&softmax::BACKWARD), "softmax gradient", ONCE);
        let case = Case::new(&cross_entropy::FORWARD).input(&[8, v], &logits).input_as(INDEX, &[8], &targets);
        let case = case.output_as(Kind::Accumulator, &[8]).output_as(Kind::Accumulator, &[8]);
        // Rows do not begin at sectors, and have a target; the two numbers of a row are stored in sectors of their own.
        let loads = 1.0 + 6.0 * 32.0 / (v as f64 * size);
        check(case.scalars(&of_vocabulary), "cross_entropy", Limits { loads, stores: 32.0 / 4.0, ..ONCE });
        let of_rows = |case: Case<'static>| {
            (0..3).fold(case, |case, i| case.input_as(Kind::Accumulator, &[8], &values(4 + i, 8)))
        };
        let case = of_rows(Case::new(&cross_entropy::BACKWARD).input_as(INDEX, &[8], &targets));
        let case = case.output_view(Kind::Tested, Strides::contiguous(&[8, v]), &logits);
        // Both warps of a block load the target and three numbers of the row.
        let floor = Some([8 * v * e, 8 * v * e]);
        check(
            case.scalars(&of_vocabulary),
            "cross_entropy gradient",
            Limits {
                floor,
                loads: 1.0 + 10.0 * 32.0 / (v as f64 * size),
                stores: 1.0 + 2.0 * 32.0 / (v as f64 * size),
                ..ONCE
            },
        );
        let case =
            Case::new(&embedding::FORWARD).input(&[v, d], &values(1, v * d)).input_as(INDEX, &[rows], &index);
        // Each warp loads the index beside 512 bytes of the row.
        let floor = Some([rows * (d * e + 8), rows * d * e]);
        check(
            case.output(&[rows, d]).scalars(&of_vocabulary),
            "embedding",
            Limits { floor, loads: 1.0 + 32.0 / 512.0, ..ONCE },
        );
        // Eight tokens for each row; the starts of rows are found by binary search.
        let tokens: Vec<f64> = (0..400).map(|i| (i * 7 % 50) as f64).collect();
        let case = Case::new(&embedding::BACKWARD)
            .input_as(INDEX, &[400], &tokens)
            .input(&[400, d], &values(6, 400 * d));
        let case = case.output(&[50, d]).scalars(&[Scalar::Int(0), Scalar::Int(50)]);
        // The same for the row of each token, and the sort of the tokens, which exchanges elements of 8 bytes at powers of two.
        let conflicts = &[("tiles", 2.01)];
        check(case, "embedding gradient", Limits { loads: 1.1, stores: 1.05, conflicts, ..ONCE });
        let sum = rows_of(&reduce::SUM).scalars(&[Scalar::Int(1), Scalar::Real(1.0)]);
        // A block stores the sums of its rows, 8 bytes of a sector.
        check(sum.output(&[rows]), "sum of rows", Limits { stores: 32.0 / 8.0, ..ONCE });
        let columns = Strides::contiguous(&shape).permute(&[1, 0]);
        let sum = Case::new(&reduce::SUM).input_view(Kind::Tested, columns, &x);
        let limits = Limits { conflicts: &[("reduce_columns", one_way)], ..ONCE };
        check(sum.scalars(&[Scalar::Int(1), Scalar::Real(1.0)]).output(&[d]), "sum of columns", limits);
        let (forward, backward) = (Case::new(&attention::FORWARD), Case::new(&attention::BACKWARD));
        let operands = |case: Case<'static>| {
            case.input(&q, &of_heads(&q)).input(&k, &of_heads(&k)).input(&k, &of_heads(&k))
        };
        let case = operands(forward).output(&q).output_as(Kind::Accumulator, &q[..4]);
        // In units of all keys (or values): causal queries see half of them, and a part of a tile. Four tiles of 64 positions load 64 to
        // 256 keys; sixteen blocks of plain arithmetic load 32 to 256, and their own rows again with each 32. Of the numbers of rows, one
        // or eight lie in a sector.
        let (queries, keys) = if e == 2 { (1.0, 2.5) } else { (4.5, 9.0) };
        let limits =
            Limits { loads: (queries + keys) / 2.0, stores: if e == 2 { 1.04 } else { 1.11 }, ..ONCE };
        check(case.scalars(&attention_scalars), "attention", limits);
        let case = operands(backward).input(&q, &of_heads(&q));
        let case = case.input_as(Kind::Accumulator, &q[..4], &values(1, 1024)).input(&q, &of_heads(&q));
        let case = case.output(&q).output(&k).output(&k).scalars(&attention_scalars);
        // In units of all queries, of which keys and values are a half each: the sum of y dy loads 2; keys load queries and dy for each of
        // their tiles, and themselves; queries load keys and values for each of theirs. Plain arithmetic loads both sides for each tile,
        // and one side again for the gradient. To that come the numbers of rows, a fiftieth or an eighth.
        let loads = match e {
            2 => 1.02 * (2.0 + (1.0 + 2.0 * 1.5) + (2.0 + 2.5)) / 4.0,
            _ => 1.125 * (2.0 + (9.0 + 4.0 * 4.5) + (2.0 * 4.5 + 1.5 * 9.0)) / 4.0,
        };
        check(case, "attention gradient", Limits { loads, stores: 1.125, ..ONCE });
        // Positions 3 to 66 of two sequences, four heads.
        let frequencies = (0..32).map(|i| Scalar::Real(0.7f64.powi(i)));
        let scalars: Vec<Scalar> = [Scalar::Int(3)].into_iter().chain(frequencies).collect();
        let rotated = [2, 64, 4, 64];
        let case = Case::new(&rope::ROPE).input(&rotated, &values(7, 2 * 64 * 4 * 64)).output(&rotated);
        let case = case.scalars(&scalars);
        // The table of cosines and sines, in f32: stored for each position, loaded for each position of each sequence.
        let (loads, stores) = (1.0 + 4.0 / (4.0 * size), 1.0 + 4.0 / (2.0 * 4.0 * size));
        check(case, "rope", Limits { loads, stores, ..ONCE });
        let (n, rates) = (8192, [1e-3, 0.9, 0.95, 1e-8, 0.1, 0.1, 0.05]);
        let state = |case: Case<'static>, kind, seed| {
            case.output_view(
                kind,
                Strides::contiguous(&[n]),
                &values(seed, n).iter().map(|x| x * x).collect::<Vec<_>>(),
            )
        };
        let case = Case::new(&adamw::STEP).input(&[n], &values(1, n)).input_as(F64, &[1, 7], &rates);
        let case = state(case.input_as(F64, &[2], &[1.0, 1.0]), Kind::Tested, 2);
        let case = state(state(case, Kind::Accumulator, 3), Kind::Accumulator, 4).scalars(&[Scalar::Int(0)]);
        // Each warp loads seven rates and two numbers of the check, beside 16 sectors of gradients and what belongs to them.
        let floor = Some([n * (2 * e + 8), n * (e + 8)]);
        check(case, "adamw", Limits { floor, loads: 1.0 + 9.0 / (32.0 + 128.0 / size), ..ONCE });
        // Tiles of 128, or of 64 in f32: there the rows are loaded for two tiles of columns, the weights of the second group for two of
        // rows. To that come the starts of the groups.
        let once = if e == 2 { 1.0 } else { (2.0 * 1.0 + 1.5 * 2.0) / 3.0 };
        let limits = Limits { loads: 1.05 * once, conflicts: &[("product", 1.05)], ..ONCE };
        let case = grouped(&grouped_matmul::FORWARD).input(&[2, 96, 128], &values(2, 2 * 96 * 128));
        check(case.input_as(INDEX, &[3], &starts).output(&[128, 128]), "experts", limits);
        let (loads, conflicts) = (if e == 2 { 1.05 } else { 2.1 }, &[("gradient", 1.05)]);
        let limits = Limits { loads, conflicts, ..ONCE };
        let case = grouped(&grouped_matmul::WEIGHT_GRAD).input(&[128, 128], &values(2, 128 * 128));
        check(case.input_as(INDEX, &[3], &starts).output(&[2, 96, 128]), "gradient of experts", limits);
        let case = Case::new(&batched_matmul::TILED_MATMUL).input(&[1, 64, 96], &values(1, 64 * 96));
        let case = case.input(&[1, 96, 128], &values(2, 96 * 128)).output(&[1, 64, 128]);
        // Both tiles of columns load the rows.
        let limits = Limits { loads: (2.0 + 2.0) / 3.0, conflicts: &[("tiled", 1.05)], ..ONCE };
        check(case, "tiled product", limits);
        // The sorted values are loaded by their indices, a sector for each.
        let limits = Limits { loads: 1.0 + 32.0 / size, conflicts: &[("tiles_last", 2.0)], ..ONCE };
        let case = Case::new(&sort::SORT).input(&[4, 2048], &values(1, 4 * 2048)).output(&[4, 2048]);
        check(case.output_as(INDEX, &[4, 2048]).scalars(&[Scalar::Int(0)]), "sort", limits);
    }
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
    // Of each sector that is loaded, one float is used.
    let case = Case::new(&COLUMNS).input(&[1024], &values(1, 1024)).output(&[32]);
    let [(entry, traffic)] = case.memory_traffic(DType::F32)[..] else { panic!("one grid") };
    let counted = [traffic.loaded_sectors, traffic.stored_sectors, traffic.shared_passes];
    assert_eq!((entry, counted, traffic.shared_passes_least), ("columns", [32, 4, 2 * 32], 2));
    let limits = Limits { floor: Some([128, 128]), loads: 8.0, stores: 1.0, conflicts: &[("columns", 32.0)] };
    let beyond = |limits| beyond(&case, DType::F32, "columns", &limits);
    assert_eq!(beyond(limits), "");
    let text = beyond(Limits { loads: 7.9, ..limits });
    assert_eq!(text, "columns f32: loads 32 sectors, 8.000 times 4, at most 7.9\n");
    let text = beyond(Limits { stores: 0.9, ..limits });
    assert_eq!(text, "columns f32: stores 4 sectors, 1.000 times 4, at most 0.9\n");
    let text = beyond(Limits { conflicts: &[("columns", 31.0)], ..limits });
    assert_eq!(text, "columns f32: columns takes 32.000 passes over banks for one, at most 31\n");
}
