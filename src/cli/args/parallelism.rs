//! Options that choose styles of parallelism besides the mesh.

use super::values;
use clap::Args;
use shardgrad::dist::Mesh;
use shardgrad::nn::Plan;
use shardgrad::{Error, Kind, Result};

/// Parallelism options.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Parallelism")]
pub(crate) struct ParallelismArgs {
    /// ZeRO stage: shards over dp the optimizer state and stored parameters (1), also the gradients (2), also the parameters in
    /// use (3); needs dp in --mesh. The mesh axis fsdp means stage 3. `eval` and `generate` shard parameters in stage 3 only
    #[arg(long, value_name = "STAGE", value_parser = values::zero_stage)]
    zero: Option<usize>,
}

impl ParallelismArgs {
    /// Adds the styles to a plan.
    pub(crate) fn plan(&self, plan: Plan) -> Plan {
        match self.zero {
            Some(stage) => plan.and(Plan::zero(stage, "dp")),
            None => plan,
        }
    }

    /// Adds the styles to a plan of a model in inference, which has no gradients and no optimizer state to shard.
    pub(crate) fn inference_plan(&self, plan: Plan) -> Plan {
        if self.zero == Some(3) { self.plan(plan) } else { plan }
    }

    /// Returns the ZeRO stage over `dp`, if given.
    pub(crate) fn zero(&self) -> Option<usize> {
        self.zero
    }

    /// Returns an error text for options that do not fit the mesh.
    pub(crate) fn fault(&self, mesh: &Mesh) -> Option<String> {
        let stage = self.zero?;
        let size = |name| mesh.axis(name).map(|axis| mesh.size(axis));
        match (size("dp"), size("fsdp")) {
            (_, Some(fsdp)) if fsdp > 1 => Some(format!(
                "--zero {stage} shards over dp, but the mesh shards parameters over fsdp={fsdp} already; omit --zero for hybrid sharding, or fsdp in --mesh"
            )),
            (None, _) => Some(format!(
                "--zero {stage} shards over dp, and the mesh has no dp axis; add dp=2 to --mesh, or omit --zero"
            )),
            _ => None,
        }
    }

    /// Rejects options that do not fit the mesh.
    ///
    /// # Errors
    /// `Kind::Config`.
    pub(crate) fn check(&self, mesh: &Mesh) -> Result<()> {
        self.fault(mesh).map_or(Ok(()), |fault| Err(Error::new(Kind::Config, fault)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zero_needs_a_data_axis_without_shards() {
        let fault = |zero, mesh: &str| ParallelismArgs { zero }.fault(&Mesh::parse(mesh).unwrap());
        for mesh in ["dp=2", "dp=1", "pp=2,dp=2,tp=2", "dp=2,fsdp=1"] {
            assert_eq!(fault(Some(2), mesh), None, "{mesh}");
        }
        assert_eq!(fault(None, "fsdp=2"), None);
        assert!(
            fault(Some(1), "tp=2").unwrap().contains("--zero 1 shards over dp, and the mesh has no dp axis")
        );
        assert!(fault(Some(3), "dp=2,fsdp=2").unwrap().contains("over fsdp=2 already"));
    }

    #[test]
    fn inference_shards_in_stage_3_only() {
        let plans = |zero| {
            let args = ParallelismArgs { zero };
            [args.plan(Plan::gpt2()), args.inference_plan(Plan::gpt2())].map(|plan| plan.to_string())
        };
        assert_eq!(plans(None), [Plan::gpt2().to_string(), Plan::gpt2().to_string()]);
        let [train, infer] = plans(Some(2));
        assert!(train.contains("zero 2 dp\n") && infer == Plan::gpt2().to_string());
        let [train, infer] = plans(Some(3));
        assert!(train.contains("store * dp@* optional\n") && infer == train);
    }
}
