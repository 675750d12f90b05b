//! Occupancy checks: if NVRTC is installed, programs that test cases run on the host are compiled for GPUs too. They must not spill
//! registers, and two blocks must fit a multiprocessor. Compilation takes longer than the test cases, so about half of the programs in bf16
//! and a quarter of those in f32 are compiled for the newer of two architectures, an eighth of those in bf16 for the older too, and none in
//! f16 and f64; with `SHARDGRAD_CARDS=all` all for both. A hash of the program draws them, so that a changed program is drawn anew.

use crate::cuda::{Compiler, Program, SearchPaths, Usage};
use crate::gpu::{Grid, Step};
use crate::kernel::{Kernel, Launch};
use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::path::Path;

/// The oldest supported architecture, and the one for which kernels are tuned, with their bytes of shared memory.
const ARCHITECTURES: [(&str, u32); 2] = [("sm_80", 163 << 10), ("sm_90a", 227 << 10)];
/// An architecture with little shared memory, for the plans for such GPUs.
const SMALL: (&str, u32) = ("sm_89", 99 << 10);
/// The newest architecture that the oldest supported compiler knows.
const NEWEST: (&str, u32) = ("sm_100a", 227 << 10);
/// Registers of a multiprocessor, and the granularity of their allocation to warps.
const REGISTERS: u32 = 65_536;
const REGISTER_GRANULARITY: u32 = 256;
const WARP: u32 = 32;
/// The blocks that must fit a multiprocessor, so that one computes while the other waits. If shared memory has room for only one block, or the
/// plan asks for one only (macro `BLOCKS`), registers need room for only one.
const BLOCKS_PER_SM: u32 = 2;

/// Returns whether NVRTC is installed.
pub(super) fn compiler_is_found() -> bool {
    Compiler::open(&SearchPaths::from_env()).is_ok()
}

/// Compiles the program of a grid for each architecture and checks its resources, once: a marker file in `folder` records success.
pub(super) fn check(
    kernel: &'static str,
    grid: &Grid,
    text: &str,
    folder: &Path,
    shared_bytes_max: u32,
) -> Result<(), String> {
    let is_full = is_full();
    let architectures = match rarity(grid) {
        Rarity::Rare if !is_full => &[][..],
        _ if shared_bytes_max <= SMALL.1 => &[SMALL][..],
        _ if is_full => &ARCHITECTURES[..],
        rarity => drawn(rarity, hash_of(&text)),
    };
    let mark = hash_of(&(text, grid.entry, grid.threads, grid.shared_bytes, is_full, shared_bytes_max));
    let mark = folder.join(format!("{mark:016x}.fits"));
    if architectures.is_empty() || mark.exists() {
        return Ok(());
    }
    let Some(compiler) = compiler(folder) else { return Ok(()) };
    let mut found = String::new();
    for &architecture in architectures {
        found += &check_on(&compiler, kernel, grid, text, architecture)?;
    }
    std::fs::write(mark, found).map_err(|e| e.to_string())
}

fn hash_of(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Returns the architectures for which a program with this hash is compiled, of the share of its kind.
fn drawn(rarity: Rarity, hash: u64) -> &'static [(&'static str, u32)] {
    match rarity {
        Rarity::Common if hash.is_multiple_of(8) => &ARCHITECTURES,
        Rarity::Common if hash.is_multiple_of(2) => &ARCHITECTURES[1..],
        Rarity::Usual if hash.is_multiple_of(4) => &ARCHITECTURES[1..],
        _ => &[],
    }
}

/// Compiles the programs of a launch, which is not run, for the architecture for which kernels are tuned, and with `SHARDGRAD_CARDS=all` for
/// the oldest and the newest too; plans may differ between them.
pub(crate) fn check_programs(kernel: &Kernel, launch: &Launch<'_>) -> Result<(), String> {
    let folder = super::build::folder()?;
    let Some(compiler) = compiler(&folder) else { return Ok(()) };
    let gpu = kernel.gpu.as_ref().expect("only kernels with a plan are compiled");
    let architectures = [ARCHITECTURES[1], ARCHITECTURES[0], NEWEST];
    for architecture in architectures.into_iter().take(if is_full() { 3 } else { 1 }) {
        let plan = super::plan(kernel, launch, architecture.1)?;
        for step in plan.steps() {
            let Step::Grid(grid) = step else { continue };
            check_on(&compiler, kernel.name, grid, &grid.program(gpu.source), architecture)?;
        }
    }
    Ok(())
}

/// Whether rare programs are tested too.
pub(crate) fn is_full() -> bool {
    std::env::var("SHARDGRAD_CARDS").is_ok_and(|v| v == "all")
}

/// Returns the compiler; none where the test cases run on a GPU, for which they are compiled anyway.
fn compiler(folder: &Path) -> Option<Compiler> {
    if std::env::var_os("SHARDGRAD_KERNELS_ON").is_some_and(|device| !device.is_empty()) {
        return None;
    }
    let paths = SearchPaths { cache: Some(folder.to_path_buf()), ..SearchPaths::from_env() };
    Compiler::open(&paths).ok()
}

/// Compiles a program for an architecture with these bytes of shared memory, and returns a line on its resources.
fn check_on(
    compiler: &Compiler,
    kernel: &'static str,
    grid: &Grid,
    text: &str,
    (architecture, shared_bytes): (&str, u32),
) -> Result<String, String> {
    let compiled = compiler.compile(&Program { kernel, text }, architecture).map_err(|e| e.to_string())?;
    let usage = compiled.usage.iter().find(|usage| usage.entry == grid.entry);
    let usage = usage.ok_or_else(|| format!("{architecture}: no entry {}", grid.entry))?;
    check_limits(usage, grid, shared_bytes).map_err(|e| format!("{architecture}: {}: {e}", grid.entry))?;
    Ok(format!("{kernel} {} {architecture} {} registers\n", grid.entry, usage.registers))
}

/// How often models run programs of a dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rarity {
    /// In bf16, or of no float dtype.
    Common,
    /// In f32.
    Usual,
    /// In f16, or in f64 alone.
    Rare,
}

fn rarity(grid: &Grid) -> Rarity {
    let values = grid.defines.iter().map(|(_, value)| value);
    let names: Vec<&str> = values.flat_map(|value| value.split(|c: char| !c.is_alphanumeric())).collect();
    let has = |dtype: &str| names.contains(&dtype);
    match () {
        () if has("f16") => Rarity::Rare,
        () if has("bf16") => Rarity::Common,
        () if has("float") => Rarity::Usual,
        () if has("double") => Rarity::Rare,
        () => Rarity::Common,
    }
}

/// Returns an error for spills, and for resources beyond those of a multiprocessor.
fn check_limits(usage: &Usage, grid: &Grid, shared_bytes: u32) -> Result<(), String> {
    if usage.spill_bytes > 0 {
        return Err(format!("{} bytes are spilled", usage.spill_bytes));
    }
    let taken = usage.shared_bytes + grid.shared_bytes;
    if taken > shared_bytes {
        return Err(format!("{taken} bytes of shared memory, of {shared_bytes}"));
    }
    let planned = grid.defines.iter().find(|(name, _)| *name == "BLOCKS").and_then(|(_, n)| n.parse().ok());
    let blocks = BLOCKS_PER_SM.min(shared_bytes / taken.max(1)).min(planned.unwrap_or(BLOCKS_PER_SM));
    let of_warp = (usage.registers * WARP).next_multiple_of(REGISTER_GRANULARITY);
    let registers = of_warp * grid.threads.div_ceil(WARP) * blocks;
    if registers > REGISTERS {
        return Err(format!(
            "{} registers leave no room for {blocks} blocks of {}",
            usage.registers, grid.threads
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rarity_follows_the_dtypes_of_a_program() {
        let of = |values: &[&'static str]| {
            let defines = values.iter().map(|value| ("T", (*value).into())).collect();
            rarity(&Grid {
                entry: "f",
                defines,
                blocks: [1; 3],
                threads: 32,
                shared_bytes: 0,
                args: Vec::new(),
            })
        };
        assert_eq!(of(&["Number<bf16>", "double"]), Rarity::Common);
        assert_eq!(of(&["i64"]), Rarity::Common);
        assert_eq!(of(&["float", "double"]), Rarity::Usual);
        assert_eq!([of(&["float", "f16"]), of(&["double"])], [Rarity::Rare; 2]);
    }

    #[test]
    fn shares_of_programs_are_those_that_the_module_names() {
        let count = |rarity, architectures| {
            (0..64).filter(|&hash| drawn(rarity, hash).len() == architectures).count()
        };
        assert_eq!([0, 1, 2].map(|n| count(Rarity::Common, n)), [32, 24, 8]);
        assert_eq!([0, 1, 2].map(|n| count(Rarity::Usual, n)), [48, 16, 0]);
        assert_eq!(count(Rarity::Rare, 0), 64);
    }

    #[test]
    fn limits_match_known_values() {
        let grid = |threads, shared_bytes| Grid {
            entry: "e",
            defines: vec![],
            blocks: [1; 3],
            threads,
            shared_bytes,
            args: vec![],
        };
        let usage = |registers, spill_bytes| Usage { registers, spill_bytes, ..Usage::default() };
        assert!(check_limits(&usage(128, 0), &grid(256, 0), 163 << 10).is_ok());
        assert!(
            check_limits(&usage(129, 0), &grid(256, 0), 163 << 10).unwrap_err().contains("129 registers")
        );
        assert!(check_limits(&usage(255, 0), &grid(128, 0), 163 << 10).is_ok());
        assert!(check_limits(&usage(168, 0), &grid(256, 100 << 10), 163 << 10).is_ok(), "one block");
        let planned = Grid { defines: vec![("BLOCKS", "1".into())], ..grid(256, 0) };
        assert!(check_limits(&usage(168, 0), &planned, 163 << 10).is_ok(), "one block by the plan");
        assert!(check_limits(&usage(168, 0), &grid(256, 0), 163 << 10).is_err());
        assert!(
            check_limits(&usage(168, 0), &grid(256, 164 << 10), 163 << 10).unwrap_err().contains("shared")
        );
        assert!(
            check_limits(&usage(32, 8), &grid(256, 0), 163 << 10)
                .unwrap_err()
                .contains("8 bytes are spilled")
        );
    }
}
