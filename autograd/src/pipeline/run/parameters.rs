//! The parameters of a rank's stages in a step: gathered once and kept, or gathered by each pass of a microbatch.

use super::Step;
use crate::id::Key;
use crate::leaf::{GatherMember, GatherOrder, GatherPolicy, GatheredLifetime, StepGather, layout_of_sums};
use crate::tape::{Tape, Var};
use shardgrad_dist::Result;
use shardgrad_tensor::{Context, PackCacheGuard, Value};
use std::panic::Location;
use std::rc::Rc;

/// A parameter of a stage.
pub(super) struct StageParameter {
    /// The parameter in the layout in which its gradients are summed: the computed one, or a sharded one.
    pub(super) summed: Var,
    form: ComputedForm,
    /// Its name, for traces and errors.
    path: Rc<str>,
}

/// The form in which passes compute with a parameter.
enum ComputedForm {
    /// In its compute layout for the step: made once, read by all microbatches.
    Kept { computed: Var, _reuse: Option<PackCacheGuard> },
    /// Gathered by each pass from the layout of the sums.
    Gathered { group: u32, member: GatherMember },
}

impl Step<'_> {
    /// An empty tape for a pass of a stage.
    pub(super) fn pass_tape(&mut self, stage: usize) -> Tape {
        let (tape, stages) = (self.runner.tape(self.trains), self.runner.stages);
        let order = if self.trains { stages.gather_order(stage) } else { Vec::new() };
        let Some(last) = order.iter().max() else { return tape };
        let mut groups = vec![Vec::new(); *last as usize + 1];
        for &external in &stages.stages()[stage].external_inputs {
            let Some(key) = stages.program().external_inputs[external as usize].key else { continue };
            if let ComputedForm::Gathered { group, member } = &self.stage_parameter(stage, external, key).form
            {
                groups[*group as usize].push(member.clone());
            }
        }
        tape.with_gather_groups(groups, &Rc::new(GatherOrder::new(order)))
    }

    /// A parameter on the tape of a pass: in its compute layout, or in the layout from which the pass gathers it.
    pub(super) fn bind_parameter(
        &mut self,
        stage: usize,
        external: u32,
        key: Key,
        tape: &Tape,
    ) -> Result<Var> {
        let accumulation = self.runner.stages.program().external_inputs[external as usize].accumulation;
        let trains = self.trains;
        let StageParameter { summed, form, path } = self.stage_parameter(stage, external, key);
        Context::of(tape.rank()).set_path(path);
        let has_gradient = trains && summed.requires_grad();
        Ok(match form {
            ComputedForm::Gathered { member, .. } => {
                let site = Location::caller();
                let leaf = tape.leaf_with_policy_at(member.key, &member.stored, member.policy, site);
                if has_gradient { leaf } else { leaf.detach() }
            }
            ComputedForm::Kept { computed, .. } if !has_gradient => tape.constant(computed.tensor().clone()),
            ComputedForm::Kept { computed, .. } if summed.layout() != computed.layout() => {
                tape.gathered_leaf(Key::from(external), summed.tensor(), computed.tensor())?
            }
            ComputedForm::Kept { computed, .. } => {
                tape.leaf_accumulated_in(Key::from(external), computed.tensor(), accumulation)
            }
        })
    }

    /// Gathers the small parameters of a stage that are kept for the step, before the first pass of the stage, in shared collectives.
    pub(super) fn gather_small_parameters(&self, stage: usize) {
        let (inputs, stages) = (self.inputs, self.runner.stages);
        let external_inputs = &stages.program().external_inputs;
        let context = Context::of(self.tape.rank());
        let before = context.path();
        let mut gathers = Vec::new();
        for &external in &stages.stages()[stage].external_inputs {
            let declared = &external_inputs[external as usize];
            let Some(key) = declared.key.filter(|key| (inputs.is_trained)(*key)) else { continue };
            if self.parameters.contains_key(&external) || stages.gather_group(external).is_some() {
                continue;
            }
            let summed = self.summed_parameter(stage, external, key);
            let Some(leaf) = summed.id() else { continue };
            let (tensor, computed, path) = (summed.tensor().clone(), declared.layout.clone(), context.path());
            let site = stages.first_use(stage, external);
            gathers.push(StepGather { leaf, tensor, computed, path, site });
        }
        self.tape.gather_together(gathers);
        context.set_path(&before);
    }

    /// A parameter in the layout in which its gradients are summed, on the tape of the step.
    fn summed_parameter(&self, stage: usize, external: u32, key: Key) -> Var {
        let (tape, stages) = (&self.tape, self.runner.stages);
        let stored = (self.inputs.parameter)(key);
        let leaf =
            if (self.inputs.is_trained)(key) { tape.leaf(key, &stored) } else { tape.constant(stored) };
        if !stages.reduces_each_pass(external) {
            return leaf;
        }
        let to = &stages.program().external_inputs[external as usize].layout;
        leaf.to_layout_at(&layout_of_sums(leaf.layout(), to), stages.first_use(stage, external))
    }

    /// A parameter of a stage; redistributed once per step.
    fn stage_parameter(&mut self, stage: usize, external: u32, key: Key) -> &StageParameter {
        let is_known = self.parameters.contains_key(&external);
        let made = (!is_known).then(|| self.make_parameter(stage, external, key));
        self.parameters.extend(made.map(|parameter| (external, parameter)));
        &self.parameters[&external]
    }

    fn make_parameter(&self, stage: usize, external: u32, key: Key) -> StageParameter {
        let stages = self.runner.stages;
        let summed = self.summed_parameter(stage, external, key);
        let path = Context::of(self.tape.rank()).path();
        let to = &stages.program().external_inputs[external as usize].layout;
        let reduces_each_round = stages.reduces_each_pass(external);
        if let Some(group) = stages.gather_group(external) {
            let policy = GatherPolicy { lifetime: GatheredLifetime::Group(group), reduces_each_round };
            let (key, stored, computed) = (Key::from(external), summed.tensor().clone(), to.clone());
            let member = GatherMember { key, stored, computed, policy, path: path.clone() };
            return StageParameter { summed, form: ComputedForm::Gathered { group, member }, path };
        }
        let computed = summed.to_layout_at(to, stages.first_use(stage, external));
        let summed = if reduces_each_round { summed } else { computed.clone() };
        let is_reused = self.results.len() > 1;
        let reuse = is_reused.then(|| computed.tensor().cache_packed());
        StageParameter { summed, form: ComputedForm::Kept { computed, _reuse: reuse }, path }
    }
}
