//! Resource usage of compiled kernels, from the log of ptxas: registers, spills, stack, shared memory.

/// The resources of one entry (`__global__` function) of a program.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// The name of the entry.
    pub entry: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of stack per thread.
    pub stack_bytes: u32,
    /// Bytes of register spills per thread: stores and loads.
    pub spill_bytes: u32,
    /// Bytes of static shared memory per block.
    pub shared_bytes: u32,
}

/// Parses the log of a compilation with `--ptxas-options=-v`.
#[must_use]
pub fn parse_ptxas_log(log: &str) -> Vec<Usage> {
    let mut found: Vec<Usage> = Vec::new();
    for line in log.lines() {
        if let Some(entry) =
            line.split("Compiling entry function '").nth(1).and_then(|t| t.split('\'').next())
        {
            found.push(Usage { entry: entry.into(), ..Usage::default() });
        }
        let Some(usage) = found.last_mut() else { continue };
        let before = |what: &str| -> Option<u32> {
            let text = line[..line.find(what)?].trim_end();
            text[text.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1)..].parse().ok()
        };
        let mut take = |field: fn(&mut Usage) -> &mut u32, what: &str| {
            if let Some(number) = before(what) {
                *field(usage) = number;
            }
        };
        take(|u| &mut u.stack_bytes, "bytes stack frame");
        take(|u| &mut u.registers, "registers");
        take(|u| &mut u.shared_bytes, "bytes smem");
        usage.spill_bytes +=
            before("bytes spill stores").unwrap_or(0) + before("bytes spill loads").unwrap_or(0);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ptxas_log_is_parsed() {
        let log = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'copy' for 'sm_90a'\n\
            ptxas info    : Function properties for copy\n\
            \x20   16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n\
            ptxas info    : Used 18 registers, used 1 barriers, 16 bytes cumulative stack size, 1024 bytes smem\n\
            ptxas info    : Compiling entry function 'other' for 'sm_90a'\n\
            \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 8 registers, used 0 barriers, 384 bytes cmem[0]\n";
        let copy = Usage {
            entry: "copy".into(),
            registers: 18,
            stack_bytes: 16,
            spill_bytes: 12,
            shared_bytes: 1024,
        };
        let other = Usage { entry: "other".into(), registers: 8, ..Usage::default() };
        assert_eq!(parse_ptxas_log(log), [copy, other]);
    }
}
