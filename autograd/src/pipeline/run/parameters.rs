//! The parameters of a rank's stages in a step: gathered once and kept, or gathered by each pass of a microbatch.

use super::Step;
use crate::id::Key;
use crate::leaf::{GatherMember, GatherOrder, GatherPolicy, GatheredLifetime, layout_of_sums};
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

    /// A parameter of a stage; redistributed once per step.
    fn stage_parameter(&mut self, stage: usize, external: u32, key: Key) -> &StageParameter {
        let (tape, inputs, stages) = (&self.tape, self.inputs, self.runner.stages);
        let is_reused = self.results.len() > 1;
        let make = || {
            let stored = (inputs.parameter)(key);
            let path = Context::of(tape.rank()).path();
            let leaf = if (inputs.is_trained)(key) { tape.leaf(key, &stored) } else { tape.constant(stored) };
            let to = &stages.program().external_inputs[external as usize].layout;
            let site = stages.first_use(stage, external);
            let reduces_each_round = stages.reduces_each_pass(external);
            let summed = match reduces_each_round {
                true => leaf.to_layout_at(&layout_of_sums(leaf.layout(), to), site),
                false => leaf.clone(),
            };
            if let Some(group) = stages.gather_group(external) {
                let policy = GatherPolicy { lifetime: GatheredLifetime::Group(group), reduces_each_round };
                let (key, stored, computed) = (Key::from(external), summed.tensor().clone(), to.clone());
                let member = GatherMember { key, stored, computed, policy, path: path.clone() };
                return StageParameter { summed, form: ComputedForm::Gathered { group, member }, path };
            }
            let computed = summed.to_layout_at(to, site);
            let summed = if reduces_each_round { summed } else { computed.clone() };
            let reuse = is_reused.then(|| computed.tensor().cache_packed());
            StageParameter { summed, form: ComputedForm::Kept { computed, _reuse: reuse }, path }
        };
        self.parameters.entry(external).or_insert_with(make)
    }
}
