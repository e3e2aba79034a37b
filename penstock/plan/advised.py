"""What rules have to say of one run that stays as it is: `penstock plan --layout` prints it."""

from penstock.config.run import Run
from penstock.models.count import count
from penstock.plan.hardware import Cluster
from penstock.plan.projection import Advice
from penstock.plan.rules.book import advice
from penstock.plan.rules.sizes import facts_of, sizes_of


def advice_for(run: Run, cluster: Cluster) -> tuple[Advice, ...]:
    """Advice of a run on a cluster, in the order of the rules.

    Args:
        run: can start on the cluster.
        cluster: where.
    """
    counted = count(run.model, run.training.sequence_length)
    facts = facts_of(run.model, total_parameters=counted.parameters, active_parameters=counted.active_parameters)
    told = advice(sizes_of(run, cluster, facts))
    return tuple(Advice(rule=rule.name, reason=reason, source=rule.source, changes=rule.fix) for rule, reason in told)
