package container

import (
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// mergeResources changes what r sets in res. CPU sets, the pids limit and the
// unified settings stand in res only for the one call: if r does not name them,
// the kernel's values stay.
func mergeResources(res *cgroups.Resources, r *specs.LinuxResources) {
	mergeMemory(res, r.Memory)
	mergeCPU(res, r.CPU)
	mergeBlockIO(res, r.BlockIO)
	res.PidsLimit = nil
	if r.Pids != nil {
		res.PidsLimit = r.Pids.Limit
	}
	res.Unified = r.Unified
}

func mergeMemory(res *cgroups.Resources, m *specs.LinuxMemory) {
	res.MemoryCheckBeforeUpdate = false
	if m == nil {
		return
	}
	set(&res.Memory, m.Limit)
	set(&res.MemoryReservation, m.Reservation)
	set(&res.MemorySwap, m.Swap)
	set(&res.MemoryCheckBeforeUpdate, m.CheckBeforeUpdate)
	if m.Limit != nil && *m.Limit == -1 && m.Swap == nil {
		// The kernel refuses a limit of swap without one of memory.
		res.MemorySwap = 0
	}
}

func mergeCPU(res *cgroups.Resources, c *specs.LinuxCPU) {
	if c == nil {
		c = &specs.LinuxCPU{}
	}
	mergeQuota(res, value(c.Period), value(c.Quota))
	res.CpuBurst = c.Burst
	res.CPUIdle = c.Idle
	shares := c.Shares
	if c.Idle != nil && shares == nil {
		// The kernel refuses a weight while the cgroup is idle.
		shares = new(uint64)
	}
	if shares != nil {
		res.CpuShares = *shares
		res.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(*shares)
	}
	set(&res.CpuRtPeriod, c.RealtimePeriod)
	set(&res.CpuRtRuntime, c.RealtimeRuntime)
	res.CpusetCpus = c.Cpus
	res.CpusetMems = c.Mems
}

// mergeQuota sets period and quota. Some cgroup drivers need both, so one alone
// goes with the present value of the other.
func mergeQuota(res *cgroups.Resources, period uint64, quota int64) {
	if (period == 0) == (quota == 0) {
		res.CpuPeriod, res.CpuQuota = period, quota
		return
	}
	if period != 0 {
		res.CpuPeriod = period
		return
	}
	res.CpuQuota = quota
}

func mergeBlockIO(res *cgroups.Resources, b *specs.LinuxBlockIO) {
	if b == nil {
		return
	}
	set(&res.BlkioWeight, b.Weight)
	set(&res.BlkioLeafWeight, b.LeafWeight)
	for _, d := range b.WeightDevice {
		res.BlkioWeightDevice = mergeWeight(res.BlkioWeightDevice, d)
	}
	for _, t := range []struct {
		to   *[]*cgroups.ThrottleDevice
		from []specs.LinuxThrottleDevice
	}{
		{&res.BlkioThrottleReadBpsDevice, b.ThrottleReadBpsDevice},
		{&res.BlkioThrottleWriteBpsDevice, b.ThrottleWriteBpsDevice},
		{&res.BlkioThrottleReadIOPSDevice, b.ThrottleReadIOPSDevice},
		{&res.BlkioThrottleWriteIOPSDevice, b.ThrottleWriteIOPSDevice},
	} {
		for _, d := range t.from {
			*t.to = mergeThrottle(*t.to, d)
		}
	}
}

// mergeWeight and mergeThrottle copy what they change: the present
// configuration shares the devices and must survive a failure.

func mergeWeight(list []*cgroups.WeightDevice, d specs.LinuxWeightDevice) []*cgroups.WeightDevice {
	out := make([]*cgroups.WeightDevice, 0, len(list)+1)
	next := cgroups.NewWeightDevice(d.Major, d.Minor, 0, 0)
	for _, old := range list {
		if old.Major == d.Major && old.Minor == d.Minor {
			next.Weight, next.LeafWeight = old.Weight, old.LeafWeight
			continue
		}
		out = append(out, old)
	}
	set(&next.Weight, d.Weight)
	set(&next.LeafWeight, d.LeafWeight)
	return append(out, next)
}

func mergeThrottle(list []*cgroups.ThrottleDevice, d specs.LinuxThrottleDevice) []*cgroups.ThrottleDevice {
	out := make([]*cgroups.ThrottleDevice, 0, len(list)+1)
	for _, old := range list {
		if old.Major != d.Major || old.Minor != d.Minor {
			out = append(out, old)
		}
	}
	return append(out, cgroups.NewThrottleDevice(d.Major, d.Minor, d.Rate))
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}

func value[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
