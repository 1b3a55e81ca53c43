# Completion for bash of train.py and samestep. In the folder of the project:
#
#   source scripts/completion.bash                                  # in this shell
#   echo "source '$PWD/scripts/completion.bash'" >> ~/.bashrc       # in every new one
_samestep_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
_samestep_complete() {
    local words
    words=$(sh "$_samestep_folder/complete.sh" "${COMP_WORDS[@]:0:COMP_CWORD+1}" 2> /dev/null)
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}")
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/} # model=mlp is one word
complete -o nospace -o default -F _samestep_complete python python3 samestep
