//! Dot products of bf16 in AMX tile registers.
//!
//! The instructions are inline assembly, since the compiler has no stable intrinsics for them.

use crate::cpu::simd::pack_bf16::PANEL;
use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// The number of the system call `arch_prctl`.
const ARCH_PRCTL: i64 = 158;
/// Its request for permission to use a part of the CPU's state.
const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
/// The part of the state that holds tile registers.
const XTILEDATA: i64 = 18;

/// Returns whether this process may use tile registers. The first call asks the operating system for permission, for all threads; callers
/// cache the answer.
pub(crate) fn granted() -> bool {
    if !cfg!(target_os = "linux") || __cpuid(0).eax < 7 || !is_x86_feature_detected!("avx512bf16") {
        return false;
    }
    let (features, tiles, bf16) = (__cpuid_count(7, 0).edx, 1 << 24, 1 << 22);
    let saves = __cpuid(1).ecx & 1 << 27 != 0;
    if features & tiles == 0 || features & bf16 == 0 || !saves || !saved_by_system() {
        return false;
    }
    let answer: i64;
    // SAFETY: a system call that reads and writes no memory of this process; the kernel changes rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => answer,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer == 0
}

/// Returns whether the operating system saves tile registers and their shapes on context switches.
fn saved_by_system() -> bool {
    #[target_feature(enable = "xsave")]
    fn states() -> u64 {
        // SAFETY: the register exists if the operating system has enabled `xsave`, which the caller checked.
        unsafe { _xgetbv(0) }
    }
    // SAFETY: called only if the CPU reports that the operating system has enabled `xsave`.
    let states = unsafe { states() };
    states >> 17 & 3 == 3
}

/// The operand of `ldtilecfg`: the shapes of the tile registers.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Ownership of eight tile registers of 16 rows of 64 bytes, on this thread, until dropped.
pub(crate) struct Registers(());

impl Registers {
    /// # Safety
    /// Tile registers are [`granted`].
    pub(crate) unsafe fn new() -> Registers {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].fill(64);
        rows[..8].fill(16);
        let shapes = Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: 64 bytes are read; the shapes are those of palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
        Registers(())
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: the registers were set up by this value; releasing them makes context switches cheap again.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// The loop over the steps, with or without the instructions for the second half of the rows and of the columns.
macro_rules! sums {
    ($steps:ident, $a:ident, $b:ident, $c:ident, $b_row:expr, [$a_step:expr, $b_step:expr], [$($body:literal),*], [$($store:literal),*]) => {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "test {steps}, {steps}",
            "jz 3f",
            "2:",
            "tileloadd tmm4, [{a} + {a_row} * 1]",
            "tileloadd tmm6, [{b} + {b_row} * 1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            $($body,)*
            "add {a}, {a_step}",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 2b",
            "3:",
            "tilestored [{c} + {c_row} * 1], tmm0",
            $($store,)*
            steps = inout(reg) $steps => _,
            a = inout(reg) $a => _,
            b = inout(reg) $b => _,
            c = in(reg) $c,
            a_row = in(reg) 64usize,
            b_row = in(reg) $b_row as usize,
            c_row = in(reg) 4 * PANEL,
            a_step = const $a_step,
            b_step = const $b_step,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// c_ij = the dot product of vector i of a (vector-major) and vector j of b (pair-major) over `steps` steps, for `extents` vectors of
/// each, 16 or 32; rows of c are [`PANEL`] apart. A sum starts at 0 and accumulates one step at a time: the products of even terms,
/// summed in order by fused multiply-adds, plus those of odd terms.
///
/// # Safety
/// The panels are packed, c has room, and this thread has [`Registers`].
pub(crate) unsafe fn dot_panel(steps: usize, a: *const u32, b: *const u32, extents: [usize; 2], c: *mut f32) {
    // SAFETY: the addresses below stay within one step of a panel; c has 16 or 32 rows of 128 bytes; the caller guarantees the rest.
    unsafe {
        match extents {
            [PANEL, PANEL] => sums!(
                steps,
                a,
                b,
                c,
                128,
                [2048, 2048],
                [
                    "tileloadd tmm7, [{b} + {b_row} * 1 + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tileloadd tmm5, [{a} + {a_row} * 1 + 1024]",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7"
                ],
                [
                    "tilestored [{c} + {c_row} * 1 + 64], tmm1",
                    "tilestored [{c} + {c_row} * 1 + 2048], tmm2",
                    "tilestored [{c} + {c_row} * 1 + 2112], tmm3"
                ]
            ),
            [PANEL, _] => sums!(
                steps,
                a,
                b,
                c,
                64,
                [2048, 1024],
                ["tileloadd tmm5, [{a} + {a_row} * 1 + 1024]", "tdpbf16ps tmm2, tmm5, tmm6"],
                ["tilestored [{c} + {c_row} * 1 + 2048], tmm2"]
            ),
            [_, PANEL] => sums!(
                steps,
                a,
                b,
                c,
                128,
                [1024, 2048],
                ["tileloadd tmm7, [{b} + {b_row} * 1 + 64]", "tdpbf16ps tmm1, tmm4, tmm7"],
                ["tilestored [{c} + {c_row} * 1 + 64], tmm1"]
            ),
            _ => sums!(steps, a, b, c, 64, [1024, 1024], [], []),
        }
    }
}
