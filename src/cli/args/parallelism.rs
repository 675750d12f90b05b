//! Options that choose styles of parallelism besides the mesh.

use super::axes::check_axes;
use super::values::{self, PlanArg};
use clap::{Args, ValueEnum};
use shardgrad::dist::Mesh;
use shardgrad::nn::{ModelConfig, Plan};
use shardgrad::{Error, Kind, Result};
use std::path::Path;

/// How rows reach the experts of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ExpertsArg {
    /// Every rank gathers the rows of all ranks of ep
    Gather,
    /// Each row travels to the ranks of its experts and back
    Exchange,
}

/// How queries meet the keys and values of other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ContextArg {
    /// Every rank gathers the keys and values of all tokens
    Gather,
    /// Keys and values travel around the ranks; on CPUs tokens are permuted so that ranks share causal attention equally, unless the
    /// model trains with dropout, whose masks follow the order of tokens
    Ring,
    /// An all-to-all shards heads in place of tokens during attention
    Exchange,
}

/// Parallelism options.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Parallelism")]
pub(crate) struct ParallelismArgs {
    /// ZeRO stage: shards over dp the optimizer state and stored parameters (1), also the gradients (2), also the parameters in
    /// use (3); needs dp in --mesh. The mesh axis fsdp means stage 3. `eval` and `generate` shard parameters in stage 3 only
    #[arg(long, value_name = "STAGE", value_parser = values::zero_stage)]
    zero: Option<usize>,
    /// Stage 3 on a pipeline: bytes of gathered parameters, as in 2GB, up to which a rank keeps them for the step; a rank whose stages
    /// take more gathers by microbatch [default: kept if the step fits into the memory of the ranks]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes_or_none)]
    gathered_bytes_max: Option<values::Bytes>,
    /// Shard the residual stream, norms and dropout along tokens over tp, in training; for GPT-2 and the Llama family
    #[arg(long)]
    sequence_parallel: bool,
    /// How queries meet the keys and values of other ranks of cp [default: gather]
    #[arg(long, value_name = "HOW", value_enum)]
    context: Option<ContextArg>,
    /// How rows reach the experts of other ranks of ep [default: by fewer bytes, for each layer]
    #[arg(long, value_name = "HOW", value_enum)]
    experts: Option<ExpertsArg>,
    /// File with the plan, as `explain --show-plan` prints it, in place of the plan of the model's family (docs/plans.md)
    #[arg(long, value_name = "FILE", value_parser = values::plan)]
    plan: Option<PlanArg>,
}

impl ParallelismArgs {
    /// Returns the plan of a run: the file of `--plan`, or else the plan of the model's family, with the styles.
    pub(crate) fn plan(&self, family: Plan) -> Plan {
        let experts = |plan: Plan| match self.experts {
            Some(ExpertsArg::Gather) => plan.and(Plan::expert_parallel("ep").gather_experts()),
            Some(ExpertsArg::Exchange) => plan.and(Plan::expert_parallel("ep").exchange_experts()),
            None => plan,
        };
        let context = |plan: Plan| match self.context {
            Some(ContextArg::Gather) => plan.and(Plan::context_parallel("cp")),
            Some(ContextArg::Ring) => plan.and(Plan::context_parallel("cp").ring()),
            Some(ContextArg::Exchange) => plan.and(Plan::context_parallel("cp").exchange()),
            None => plan,
        };
        let plan = context(experts(self.plan.as_ref().map_or(family, |plan| plan.plan.clone())));
        let plan = match self.sequence_parallel {
            true => plan.and(Plan::sequence_parallel("tp")),
            false => plan,
        };
        let plan = match self.zero {
            Some(stage) => plan.and(Plan::zero(stage, "dp")),
            None => plan,
        };
        match self.gathered_bytes_max {
            Some(bytes) => plan.gathered_bytes_max(usize::try_from(bytes.0).unwrap_or(usize::MAX)),
            None => plan,
        }
    }

    /// Returns the plan file, if given.
    pub(crate) fn plan_file(&self) -> Option<&Path> {
        self.plan.as_ref().map(|plan| plan.file.as_path())
    }

    /// Rejects unknown axes. A plan file names its own axes: the model refuses those that it does not use.
    ///
    /// # Errors
    /// `Kind::Mesh`.
    pub(super) fn check_axes(&self, mesh: &Mesh) -> Result<()> {
        match self.plan {
            Some(_) => Ok(()),
            None => check_axes(mesh),
        }
    }

    /// Adds the styles to a plan of a model in inference, which has no gradients, no optimizer state and no saved activations to shard.
    pub(crate) fn inference_plan(&self, plan: Plan) -> Plan {
        let zero = self.zero.filter(|stage| *stage == 3);
        ParallelismArgs { zero, sequence_parallel: false, ..self.clone() }.plan(plan)
    }

    /// Rejects styles that the model's family does not have.
    ///
    /// # Errors
    /// `Kind::Unsupported`.
    pub(crate) fn check_family(&self, config: &ModelConfig) -> Result<()> {
        match config {
            ModelConfig::Bert(_) if self.sequence_parallel => {
                let why = "--sequence-parallel shards the tokens of GPT-2 and the Llama family, and the model is an encoder";
                Err(Error::new(Kind::Unsupported, why).detail("help", "omit --sequence-parallel"))
            }
            _ => Ok(()),
        }
    }

    /// Returns the ZeRO stage over `dp`, if given.
    pub(crate) fn zero(&self) -> Option<usize> {
        self.zero
    }

    /// Returns an error text for options that do not fit the mesh.
    pub(crate) fn fault(&self, mesh: &Mesh) -> Option<String> {
        let size = |name| mesh.axis(name).map(|axis| mesh.size(axis));
        if self.sequence_parallel && size("tp").is_none() {
            return Some(
                "--sequence-parallel needs a tp axis; add tp=2 to --mesh, or omit --sequence-parallel"
                    .to_string(),
            );
        }
        if self.context.is_some() && size("cp").is_none() {
            return Some("--context needs a cp axis; add cp=2 to --mesh, or omit --context".to_string());
        }
        if self.experts.is_some() && size("ep").is_none() {
            return Some("--experts needs an ep axis; add ep=2 to --mesh, or omit --experts".to_string());
        }
        let has_stage_3 = self.zero == Some(3) || size("fsdp").is_some();
        if self.gathered_bytes_max.is_some() && self.plan.is_none() && !(has_stage_3 && size("pp").is_some())
        {
            return Some(
                "--gathered-bytes-max is for stage 3 of ZeRO on a pipeline; add pp=2,fsdp=2 to --mesh, or omit --gathered-bytes-max"
                    .to_string(),
            );
        }
        let stage = self.zero?;
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
        let fault = |zero, mesh: &str| {
            ParallelismArgs { zero, ..Default::default() }.fault(&Mesh::parse(mesh).unwrap())
        };
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
    fn a_bound_of_gathered_bytes_needs_stage_3_on_a_pipeline() {
        let args = |zero| {
            let gathered_bytes_max = Some(values::Bytes(0));
            ParallelismArgs { zero, gathered_bytes_max, ..Default::default() }
        };
        let fault = |zero, mesh: &str| args(zero).fault(&Mesh::parse(mesh).unwrap());
        for (zero, mesh) in [(None, "pp=2,dp=2"), (None, "fsdp=2"), (Some(2), "pp=2,dp=2"), (Some(3), "dp=2")]
        {
            assert!(fault(zero, mesh).unwrap().contains("stage 3 of ZeRO on a pipeline"), "{zero:?} {mesh}");
        }
        assert_eq!((fault(None, "pp=2,fsdp=2"), fault(Some(3), "pp=2,dp=2")), (None, None));
        assert!(args(Some(3)).plan(Plan::gpt2()).to_string().contains("gathered_bytes_max 0\n"));
    }

    #[test]
    fn context_and_experts_need_their_axes() {
        let args = ParallelismArgs { sequence_parallel: true, ..Default::default() };
        assert!(
            args.fault(&Mesh::parse("dp=2").unwrap()).unwrap().contains("--sequence-parallel needs a tp")
        );
        assert!(args.plan(Plan::gpt2()).to_string().contains("regather *.ln_1.out optional\n"));
        assert!(!args.inference_plan(Plan::gpt2()).to_string().contains("regather"));
        assert!(args.check_family(&ModelConfig::preset("tiny").unwrap()).is_ok());
        let error = args.check_family(&ModelConfig::preset("bert-base").unwrap()).unwrap_err();
        assert!(error.message().contains("the model is an encoder"));
        let args = ParallelismArgs { context: Some(ContextArg::Ring), ..Default::default() };
        assert!(args.fault(&Mesh::parse("dp=2").unwrap()).unwrap().contains("--context needs a cp axis"));
        let text = args.plan(Plan::gpt2()).to_string();
        assert!(args.fault(&Mesh::parse("cp=2").unwrap()).is_none() && text.contains("point keys cp@1"));
        let args = ParallelismArgs { experts: Some(ExpertsArg::Exchange), ..Default::default() };
        assert!(args.fault(&Mesh::parse("dp=2").unwrap()).unwrap().contains("--experts needs an ep axis"));
        assert_eq!(args.fault(&Mesh::parse("ep=2").unwrap()), None);
        let text = args.plan(Plan::llama_moe()).to_string();
        assert!(text.contains("point experts.rows ep@0 optional\n"), "{text}");
    }

    #[test]
    fn a_plan_file_replaces_the_plan_of_the_family_and_names_its_own_axes() {
        let plan = Plan::data_parallel("rows");
        let file = Some(PlanArg { plan: plan.clone(), file: "a.plan".into() });
        let args = ParallelismArgs { plan: file, ..Default::default() };
        assert_eq!(args.plan(Plan::gpt2()), plan);
        assert_eq!(args.inference_plan(Plan::gpt2()), plan);
        let mesh = Mesh::parse("rows=2").unwrap();
        assert!(args.check_axes(&mesh).is_ok());
        assert!(ParallelismArgs::default().check_axes(&mesh).is_err());
    }

    #[test]
    fn inference_shards_in_stage_3_only() {
        let plans = |zero| {
            let args = ParallelismArgs { zero, ..Default::default() };
            [args.plan(Plan::gpt2()), args.inference_plan(Plan::gpt2())].map(|plan| plan.to_string())
        };
        assert_eq!(plans(None), [Plan::gpt2().to_string(), Plan::gpt2().to_string()]);
        let [train, infer] = plans(Some(2));
        assert!(train.contains("zero 2 dp\n") && infer == Plan::gpt2().to_string());
        let [train, infer] = plans(Some(3));
        assert!(train.contains("store * dp@* optional\n") && infer == train);
    }
}
