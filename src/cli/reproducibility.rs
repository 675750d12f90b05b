//! Levels of reproducibility: which changes of a run leave its bits as they are, as `train` states them in its first lines, and
//! `doctor` for this machine.

use shardgrad::kernels::cpu::gemm::has_bf16_dot;
use shardgrad::kernels::cpu::simd::{LIMIT_VARIABLE, limit};
use shardgrad::kernels::{DType, MatmulPrecision};
use shardgrad::nn::Deterministic;

/// The ops that every x86-64 CPU computes alike: `tests/deterministic_option.rs` trains on each instruction set.
const ALIKE_ON_X86_64: &str = "f32 and f16 with AVX-512, AVX2 or neither";
/// The functions that the C library computes.
const C_LIBRARY_FUNCTIONS: &str = "powers, sines and cosines (RoPE, learning rate, bias correction) and functions of f64 are those of the C library";

/// What decides the levels of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunFacts {
    pub(super) deterministic: Deterministic,
    pub(super) is_on_host: bool,
    /// Whether NCCL carries the collectives.
    pub(super) is_over_nccl: bool,
    /// Whether sums over NCCL have the order of the other transports.
    pub(super) has_tree_sums: bool,
    pub(super) dtype: DType,
    pub(super) precision: MatmulPrecision,
}

/// What a guarantee of reproducibility is about (a level, or a class of ops), and for which changes it holds.
pub(super) type Guarantee = (&'static str, String);

impl RunFacts {
    /// Returns the levels, the weakest first.
    pub(super) fn levels(&self) -> [Guarantee; 5] {
        let any_mesh = match self.deterministic {
            Deterministic::Run => None,
            Deterministic::Mesh { batch_leaves, sum_leaves } => Some(format!(
                "yes, any of dp, fsdp, ep, pp, tp and cp (without a ring) whose ranks of rows times microbatches divide {batch_leaves} \
                 leaves of the batch, and whose other ranks of a sum divide {sum_leaves} leaves of sums"
            )),
        };
        let run = match self.is_on_host {
            true => "yes, with any number of threads",
            false => "yes, on the same model of GPU with the same libraries",
        };
        let resume = match any_mesh {
            Some(_) => "yes, on any such mesh",
            None => "yes, on the same mesh with as many microbatches",
        };
        let transport = match (self.is_on_host, self.is_over_nccl, self.has_tree_sums) {
            (true, ..) => "yes, threads or processes over TCP",
            (false, _, true) => "yes, threads or processes over TCP or NCCL",
            (false, true, false) => "no, NCCL adds in its own order (--deterministic transport)",
            (false, false, false) => {
                "yes, threads or processes over TCP; not NCCL (--deterministic transport)"
            }
        };
        let mesh = any_mesh.unwrap_or_else(|| match self.is_on_host {
            true => "no, another one agrees to rounding (--deterministic mesh)".to_string(),
            false => "no, another one agrees to rounding".to_string(),
        });
        let machine = match self.is_on_host {
            true => machine(self.dtype, self.precision),
            false => "no, libraries choose products by the GPU".to_string(),
        };
        [
            ("run", run.to_string()),
            ("resume", resume.to_string()),
            ("transport", transport.to_string()),
            ("mesh", mesh),
            ("machine", machine),
        ]
    }
}

/// Whether products of a dtype may use bf16 dot products.
fn may_use_bf16_dot(dtype: DType, precision: MatmulPrecision) -> bool {
    dtype == DType::BF16 || dtype == DType::F32 && precision == MatmulPrecision::Medium
}

/// Returns on which CPUs a run has the same bits.
fn machine(dtype: DType, precision: MatmulPrecision) -> String {
    match (may_use_bf16_dot(dtype, precision), has_bf16_dot()) {
        (true, true) => format!(
            "no, products use bf16 dot products of this CPU ({LIMIT_VARIABLE}=avx512: FMA, alike on x86-64)"
        ),
        (true, false) if limit().is_none() => format!(
            "x86-64 without bf16 dot products (AMX, AVX512-BF16), or with {LIMIT_VARIABLE} set; {C_LIBRARY_FUNCTIONS}"
        ),
        _ if dtype == DType::F64 => format!("x86-64 with the same C library; {C_LIBRARY_FUNCTIONS}"),
        _ => format!("x86-64 with AVX-512, AVX2 or neither; {C_LIBRARY_FUNCTIONS}"),
    }
}

/// Returns for each class of ops which CPUs have the same bits, for this machine.
pub(super) fn op_classes() -> [Guarantee; 3] {
    let products = match (has_bf16_dot(), limit()) {
        (true, _) => format!(
            "no, this CPU's dot products (AMX or AVX512-BF16) sum in another order than FMA; {LIMIT_VARIABLE}=avx512 turns them off"
        ),
        (false, None) => format!(
            "CPUs without bf16 dot products; with them (AMX, AVX512-BF16) if {LIMIT_VARIABLE} is set there"
        ),
        (false, Some(_)) => format!("every x86-64 CPU, since {LIMIT_VARIABLE} is set"),
    };
    [
        ("ops of f32 and f16", format!("{ALIKE_ON_X86_64}: every x86-64 CPU")),
        ("products of bf16, and of f32 at medium precision", products),
        ("functions", format!("{C_LIBRARY_FUNCTIONS}; all others are alike")),
    ]
}

/// Returns what holds on this machine by default, and with which options more.
pub(super) fn of_machine() -> [Guarantee; 5] {
    [
        ("run", "yes, with any number of threads".to_string()),
        ("resume", "yes, on the same mesh; on another one with --deterministic mesh".to_string()),
        (
            "transport",
            "yes, threads or processes over TCP; over NCCL with --deterministic transport".to_string(),
        ),
        ("mesh", "to rounding; the same bits with --deterministic mesh, on the CPU".to_string()),
        ("machine", "by class of ops".to_string()),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: RunFacts = RunFacts {
        deterministic: Deterministic::Run,
        is_on_host: true,
        is_over_nccl: false,
        has_tree_sums: false,
        dtype: DType::F32,
        precision: MatmulPrecision::Highest,
    };

    fn level(facts: &RunFacts, name: &str) -> String {
        facts.levels().into_iter().find(|(known, _)| *known == name).unwrap().1
    }

    #[test]
    fn levels_follow_from_the_options() {
        let mesh = RunFacts { deterministic: Deterministic::Mesh { batch_leaves: 6, sum_leaves: 8 }, ..HOST };
        assert!(level(&HOST, "mesh").starts_with("no, another one agrees to rounding"));
        assert!(level(&mesh, "mesh").contains("6 leaves of the batch"));
        assert!(
            level(&HOST, "resume").contains("the same mesh")
                && level(&mesh, "resume").contains("any such mesh")
        );
        let gpu = RunFacts { is_on_host: false, is_over_nccl: true, ..HOST };
        assert!(level(&HOST, "transport").starts_with("yes") && level(&gpu, "transport").starts_with("no"));
        assert!(level(&RunFacts { has_tree_sums: true, ..gpu }, "transport").contains("NCCL"));
        assert!(level(&HOST, "machine").starts_with("x86-64 with AVX-512, AVX2 or neither"));
        let bf16 = level(&RunFacts { dtype: DType::BF16, ..HOST }, "machine");
        let medium = level(&RunFacts { precision: MatmulPrecision::Medium, ..HOST }, "machine");
        assert!(bf16 == medium && bf16.starts_with("no") == has_bf16_dot(), "{bf16}");
    }
}
