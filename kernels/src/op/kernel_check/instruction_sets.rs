//! The bits of kernels on each instruction set. The test starts this test program again under a limit; there each case of a kernel runs
//! its fast path only, and writes a hash of the results to a file.

use super::{Case, Operand};
use crate::cpu::Pool;
use crate::cpu::gemm::has_bf16_dot;
use crate::cpu::simd::LIMIT_VARIABLE;
use crate::dtype::DType;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable with the file that cases write to, in place of checks.
const RECORD_VARIABLE: &str = "SHARDGRAD_KERNEL_BITS";

/// The kernels that multiply bf16 by the dot products of the CPU.
const PRODUCTS: [&str; 1] = ["none"];

/// Names of kernels, each with a dtype.
type Kernels = BTreeSet<(String, String)>;

/// Returns the file that cases write to, if this program records bits.
pub(super) fn record_file() -> Option<PathBuf> {
    std::env::var_os(RECORD_VARIABLE).map(PathBuf::from)
}

impl Case<'_> {
    /// Runs the fast path on one thread, and appends a line to a file: kernel, dtype, a hash of the operands, a hash of the results.
    pub(super) fn record_bits(
        &self,
        file: &Path,
        pool: &Pool,
        tested: DType,
        [inputs, outputs]: [&[Operand]; 2],
    ) -> Result<(), String> {
        let fast = self.kernel.cpu.unwrap_or(self.kernel.reference);
        let results = self.launch(pool, fast, tested, inputs, outputs)?;
        let operands = || inputs.iter().chain(outputs);
        let form: Vec<_> = operands().map(|operand| (operand.kind, &operand.view)).collect();
        let form = format!("{form:?} {:?}", self.scalars);
        let numbers = operands().flat_map(|operand| &operand.memory).map(|x| x.to_bits());
        let (name, operands) = (self.kernel.name, hash(form.bytes().map(u64::from).chain(numbers)));
        let results =
            hash(results.into_iter().flatten().map(|x| if x.is_nan() { u64::MAX } else { x.to_bits() }));
        let mut file = OpenOptions::new().create(true).append(true).open(file).map_err(|e| e.to_string())?;
        // One write, since tests run at the same time.
        file.write_all(format!("{name} {tested} {operands:016x} {results:016x}\n").as_bytes())
            .map_err(|e| e.to_string())
    }
}

/// A hash of some words (FNV-1a).
fn hash(words: impl Iterator<Item = u64>) -> u64 {
    words.fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        (hash ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
    })
}

/// The hash of the results of each case: kernel, dtype and hash of the operands.
type Results = BTreeMap<[String; 3], String>;

/// The results of all cases under a limit.
fn results(limit: &str) -> Results {
    let file = std::env::temp_dir().join(format!("shardgrad-kernel-bits-{}-{limit}", std::process::id()));
    let _ = fs::remove_file(&file);
    let mut program = Command::new(std::env::current_exe().expect("a test program has a path"));
    program.args(["op::", "--skip", "instruction_sets", "--quiet"]);
    let output = program.env(RECORD_VARIABLE, &file).env(LIMIT_VARIABLE, limit).output().expect("it starts");
    let text = read_and_remove(&file);
    // Tests that check something else than cases may fail on results that nobody compared.
    assert!(!text.is_empty(), "limit {limit:?}: {}", String::from_utf8_lossy(&output.stderr));
    let entry = |line: &str| {
        let mut words = line.split(' ').map(str::to_string);
        let mut next = || words.next().expect("a line has four words");
        ([next(), next(), next()], next())
    };
    text.lines().map(entry).collect()
}

fn read_and_remove(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let _ = fs::remove_file(file);
    text
}

/// The kernels and dtypes of some cases.
fn kernels<'a>(cases: impl Iterator<Item = &'a [String; 3]>) -> Kernels {
    cases.map(|[kernel, dtype, _]| (kernel.clone(), dtype.clone())).collect()
}

/// The kernels and dtypes with other results. Property-based tests draw other cases in each run, which are not compared.
fn different(one: &Results, other: &Results) -> Kernels {
    let shared = || one.keys().filter(|case| other.contains_key(*case));
    assert_eq!(kernels(shared()), kernels(one.keys()), "each kernel has cases that both ran");
    kernels(shared().filter(|case| one[*case] != other[*case]))
}

#[test]
fn kernels_have_the_same_bits_on_every_instruction_set() {
    let avx2 = results("avx2");
    let num_kernels = avx2.keys().map(|[kernel, ..]| kernel).collect::<BTreeSet<_>>().len();
    assert!(num_kernels > 60, "{num_kernels}");
    // A limit above what the CPU has is no limit but on dot products.
    for limit in ["baseline", "avx512"] {
        assert_eq!(different(&avx2, &results(limit)), Kernels::new(), "avx2 and {limit}");
    }
    let of_products =
        |(kernel, dtype): &(String, String)| dtype == "bf16" && PRODUCTS.contains(&kernel.as_str());
    let unlimited = different(&avx2, &results(""));
    assert!(unlimited.iter().all(of_products), "{unlimited:?}");
    assert!(has_bf16_dot() || unlimited.is_empty(), "{unlimited:?}");
}
